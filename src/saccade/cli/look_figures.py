"""Draw the figures of ``saccade look``."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from saccade import viz
from saccade.cli.model_reading import Model, Subject
from saccade.statistics import Head
from saccade.support.language import translated
from saccade.text.labels import legible
from saccade.viz.canvas import DPI, blank, colours
from saccade.viz.ticks import KEY, QUERY, WEIGHT, name_axis, name_columns, name_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CALLED_AS = "look"  # the name in error messages

MOST_WINDOWS = 150  # in one figure, so that each window is several pixels wide
_LINES_AT_MOST = 80
_ANNOTATED_AT_MOST = 24  # maximum number of words; the numbers in a larger map are too small to read
_NUMBERED_AT_MOST = 40  # maximum number of windows that get an index
_SIDE = 1200  # pixels of the map of the full text, and its maximum number of cells
_CHOSEN = "#00738c"


def without_special(subject: Subject, weights: Tensor) -> tuple[Subject, Tensor]:
    """Remove special tokens from the words of a text and from the weights between them, for figures.

    The weights are not renormalised: a row sums to 1 minus the weight that its word gives to special tokens.

    Args:
        subject: the text, with special tokens among its words.
        weights: weights between words, ``[layers, heads, words, words]``.
    """
    kept = [[index for index, word in enumerate(side) if not word.special] for side in (subject.rows, subject.columns)]
    rows, columns = (
        tuple(side[index] for index in own) for side, own in zip((subject.rows, subject.columns), kept, strict=True)
    )
    return subject._replace(rows=rows, columns=columns), weights[:, :, kept[0]][..., kept[1]]


def figures(
    subject: Subject, weights: Tensor, best: Head, title: str | None = None
) -> Iterator[tuple[str, "Figure", str]]:
    """Draw the figures of the shown window of a text; yield the file name, figure and description of each.

    Args:
        subject: the matrices of the text.
        weights: weights between words, ``[layers, heads, words, words]``.
        best: the head to show.
        title: the title of every figure; if None, each figure gets a title of its own.
    """
    rows, columns = ([legible(word.text) for word in side] for side in (subject.rows, subject.columns))
    where = translated("layer {layer}, head {head}", layer=best.layer, head=best.head)
    chosen, words = weights[best.layer, best.head], max(len(rows), len(columns))
    labels: dict[str, Any] = {"x_labels": columns, "y_labels": rows}
    nonzero = weights.amax((0, 1)) > 0  # pairs with weight 0 in every head are hidden by the mask
    allowed = None if bool(nonzero.all()) else nonzero
    caption, annotate = (
        translated("Attention of each word (row) to each word (column): {where}", where=where),
        words <= _ANNOTATED_AT_MOST,
    )
    heatmap = viz.heatmap(chosen, annotate=annotate, allowed=allowed, **labels, **_titles(title, caption))
    yield "heatmap.png", heatmap, translated("what each word looks at in {where}", where=where)
    mosaic = viz.mosaic(weights, highlight=(best.layer, best.head), title=title, allowed=allowed)
    yield "mosaic.png", mosaic, translated("every head of every layer")
    if subject.is_cross and words <= _LINES_AT_MOST:
        caption = translated(
            "Attention of each written word (left) to each word that was read (right): {where}", where=where
        )
        lines = viz.bipartite(chosen, **labels, **_titles(title, caption))
        yield "lines.png", lines, translated("between the two texts in {where}", where=where)


def draw_full_text(
    model: Model, subject: Subject, best: Head, advance: Callable[[], None], title: str | None = None
) -> "Figure":
    """Draw one head over the full text, with the windows of the text along the diagonal.

    All other pairs are grey, because tokens in different windows never see each other. If the text has more tokens than
    the figure has pixels, the largest weight of neighbouring tokens is drawn.

    Args:
        model: the model, which is run once for each window.
        subject: the text, split into windows.
        best: the head to draw.
        advance: a function that is called after each window.
        title: the title of the figure, with its description as the subtitle; if None, the description is the title.

    Cost: a forward pass per window; memory for one window and the figure.
    """
    from matplotlib.patches import Rectangle  # noqa: PLC0415  matplotlib is optional

    count, shown = subject.windows[-1].stop, subject.windows[subject.shown]
    canvas, inches = blank(), _SIDE / DPI
    cells, ends = _pooled(model, subject, best, count, advance), (-0.5, count - 0.5, count - 0.5, -0.5)
    image = canvas.axes.imshow(cells, cmap=colours(), vmin=0, interpolation="nearest", aspect="auto", extent=ends)
    frame = (shown.start - 0.5, shown.start - 0.5), shown.stop - shown.start, shown.stop - shown.start
    canvas.axes.add_patch(Rectangle(*frame, fill=False, edgecolor=_CHOSEN, linewidth=2))
    for number, window in enumerate(subject.windows if len(subject.windows) <= _NUMBERED_AT_MOST else ()):
        beside = (window.start, "right") if window.stop > 0.95 * count else (window.stop, "left")
        canvas.write(beside[0] - 0.5, window.start - 0.5, f" {number} ", size=7, va="top", ha=beside[1])
    name_columns(canvas.axes, None, KEY, count, inches)
    name_rows(canvas.axes, None, QUERY, count, inches)
    name_axis(canvas.add_scale(image).yaxis, WEIGHT)
    caption = translated(
        "Layer {layer}, head {head} in the whole text: {count} windows, of which the framed one, {shown}, is shown in "
        "the other pictures. Grey: never seen; the model reads one window at a time.",
        layer=best.layer,
        head=best.head,
        count=len(subject.windows),
        shown=subject.shown,
    )
    return canvas.finished(inches, inches, **_titles(title, caption))


def _titles(title: str | None, caption: str) -> dict[str, Any]:
    """Return the title and the subtitle of a figure: the user's title and the description, or the description alone."""
    return {"title": title or caption, "subtitle": caption if title else None}


def _pooled(model: Model, subject: Subject, best: Head, count: int, advance: Callable[[], None]) -> np.ndarray:
    """Return the largest weight in each cell of a figure's map of the full text, ``[cells, cells]``; NaN if masked."""
    side = min(count, _SIDE)
    cells = np.full((side, side), np.nan, np.float32)
    for window in subject.windows:
        with torch.no_grad():
            layer = model.matrices(torch.tensor([window.tokens]))[best.layer].to_dense()[0, :, window.own, window.own]
        nonzero = layer.amax(0) > 0
        weights = layer[best.head].where(nonzero, torch.nan).float().numpy()
        cell_indices = np.arange(window.start, window.stop) * side // count
        np.fmax.at(cells, (cell_indices[:, None], cell_indices), weights)
        advance()
    return cells
