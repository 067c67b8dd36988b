"""Heatmaps of one matrix: rows are queries, columns are keys."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from saccade.matrix import Matrix
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import value_error
from saccade.viz.arrays import Array, as_matrix, masked, max_pool, scale_of
from saccade.viz.canvas import DPI, Canvas, blank, colours, whole_pixels
from saccade.viz.pooled_maps import chosen, map_of, places_of, refuse_choice
from saccade.viz.ticks import check_labels, name_columns, name_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

ANNOTATED_AT_MOST = 40  # rows or columns: a figure with more numbers is a table
_LONGEST, _PLAIN = 9.0, 5.0  # most inches of the map's longer side, with labels and without
_SHORTEST = 0.9  # fewest inches of the shorter side
_LINES = "#e4e4e9"  # of lines between cells


@argument_hints({})
def heatmap(
    weights: object,
    *,
    head: int | None = None,
    batch: int = 0,
    x_labels: Sequence[str] | None = None,
    y_labels: Sequence[str] | None = None,
    annotate: bool = False,
    title: str | None = None,
    x_name: str = "key",
    y_name: str = "query",
    limits: tuple[float, float] | None = None,
    allowed: object = None,
    log: bool = False,
) -> "Figure":
    """Draw a matrix as a heatmap, lazy ones of any length too: rows are queries from the top, columns are keys.

    If there are more cells than pixels, each pixel shows the value farthest from 0 of a group of neighbours, so that a
    thin diagonal or a single bright key stays visible; axes and labels still count rows and columns of the matrix.

    With numbers below 0, the scale is symmetric around 0, and 0 is white. NaN, infinite entries and pairs that are not
    allowed are grey; a weight of 0 is white. Of a lazy matrix (`saccade.AttentionMatrix` or any other
    `saccade.matrix.Matrix`) only the drawn cells are stored. Pairs that its mask hides are grey, and without labels its
    axes count the positions of the tokens.

    Sinks (keys that most queries give most of their attention) do not set the colour scale. Without ``limits``, the
    scale ends at the largest weight of 95 % of the queries, without sinks, if that is below half of the largest weight.
    Larger values get the last colour, and an arrow at the scale shows the largest.

    Args:
        weights: a lazy matrix, or ``[q_len, kv_len]``: a tensor of any dtype and device, an array, or nested lists.
        head, batch: the head and batch item of a lazy matrix to draw; only this one is computed. A matrix with one head
            needs neither.
        x_labels: one per key. Shown as text, never as mathematics; as many as fit. Long ones are cut, and one
            with a character that no installed font has is shown by its number, counted from 1: ``#4``.
        y_labels: one per query.
        annotate: write every value into its cell; at most 40 rows and 40 columns.
        title: text above the figure.
        x_name: name of the columns.
        y_name: name of the rows.
        limits: the values at the two ends of the colour scale; from the matrix when None.
        allowed: bool, broadcastable to the weights: the pairs that may attend; all when None. A lazy matrix knows them.
        log: a logarithmic colour scale of four decades, or of ``limits``; smaller values are white. It shows weights
            besides a strong sink.

    Returns:
        A figure that pyplot does not manage: it is not shown and need not be closed. `save` writes it.

    Raises:
        TypeError: ``weights`` are not real numbers, or labels are one string.
        ValueError: not a matrix, nothing finite in it, labels of another length, or a head that does not exist.
        ImportError: matplotlib is not installed.

    Cost: O(q_len * kv_len) time, and memory for dense weights; a lazy matrix takes one sweep over one head, and
    O(q_len + kv_len) memory.
    """
    if isinstance(weights, Matrix):
        item, number = chosen(weights, batch, head)
        if allowed is not None:
            raise value_error("allowed", "be left out for a lazy matrix, which knows its mask", "a mask")
        shape = weights.shape[2:]
    else:
        refuse_choice(head=head, batch=batch)
        matrix = masked(as_matrix(weights), allowed)
        shape = (matrix.shape[0], matrix.shape[1])
    check_labels("x_labels", x_labels, shape[1], "columns")
    check_labels("y_labels", y_labels, shape[0], "rows")
    if annotate and max(shape) > ANNOTATED_AT_MOST:
        rule, got = f"have at most {ANNOTATED_AT_MOST} rows and columns", f"shape {list(shape)}"
        hint = "annotate=False draws a matrix of any size."
        raise value_error("a matrix to annotate", rule, got, hint=hint)
    canvas = blank()
    width, height = _size(shape, annotate, x_labels is not None or y_labels is not None)
    pixels = round(height * DPI), round(width * DPI)
    rows = columns = None
    if isinstance(weights, Matrix):
        matrix = as_matrix(map_of(weights, item, number, max(pixels)))
        rows, columns = places_of(weights, item)
    cells = max_pool(matrix, *pixels)
    image = _draw_cells(canvas, cells, shape, scale_of(cells, limits, log=log), log)
    name_columns(canvas.axes, x_labels, x_name, shape[1], width, columns)
    name_rows(canvas.axes, y_labels, y_name, shape[0], height, rows)
    if annotate:
        _draw_values(canvas.axes, image, cells)
    return canvas.finished(width, height, title)


def rule_cells(axes: "Axes", rows: int, columns: int) -> None:
    """Draw a frame around a heatmap, and lines between its cells if these are few."""
    # Below the image, or the frame would cover its outermost pixels.
    axes.spines[:].set(color=_LINES, linewidth=1.2, zorder=-1)
    if max(rows, columns) <= ANNOTATED_AT_MOST:
        axes.set_xticks(np.arange(1, columns) - 0.5, minor=True)
        axes.set_yticks(np.arange(1, rows) - 0.5, minor=True)
        axes.grid(which="minor", color=_LINES, linewidth=0.8)
        axes.tick_params(which="minor", length=0)


def _size(shape: tuple[int, int], annotate: bool, labelled: bool) -> tuple[float, float]:
    """Return width and height of a heatmap in inches, in whole pixels: square cells, unless it would be too thin."""
    rows, columns = shape
    longer = max(rows, columns)
    # Inches of a cell, and most inches of the longer side. Annotated maps are limited in cells instead.
    cell, most = (0.44, np.inf) if annotate else (0.34, _LONGEST) if labelled else (0.6, _PLAIN)
    side = min(longer * cell, most) / longer
    width, height = max(columns * side, _SHORTEST), max(rows * side, _SHORTEST)
    return whole_pixels(width), whole_pixels(height)


def _draw_cells(
    canvas: Canvas, cells: Array, shape: tuple[int, int], scale: tuple[float, float, bool], log: bool
) -> "AxesImage":
    from matplotlib.colors import LogNorm, Normalize  # noqa: PLC0415  matplotlib is optional

    (rows, columns), (low, high, is_more), axes = shape, scale, canvas.axes
    image = axes.imshow(
        # Values below a logarithmic scale get its lowest colour: grey marks hidden cells.
        np.maximum(cells, low) if log else cells,
        cmap=colours(signed=low < 0),
        norm=(LogNorm if log else Normalize)(low, high),
        aspect="auto",
        interpolation="nearest",
        # The axes count rows and columns of the matrix, pooled or not.
        extent=(-0.5, columns - 0.5, rows - 0.5, -0.5),
    )
    rule_cells(axes, rows, columns)
    canvas.add_scale(image, float(np.fmax.reduce(cells, axis=None)) if is_more else None)
    return image


def _draw_values(axes: "Axes", image: "AxesImage", matrix: Array) -> None:
    """Write each value of a heatmap in black or white, whichever contrasts more with its cell."""
    pattern = "{:.2f}" if np.nanmax(np.abs(matrix)) < 10 else "{:.3g}"
    for (row, column), value in np.ndenumerate(matrix):
        red, green, blue, _ = image.to_rgba(np.array([value]))[0]
        text = pattern.format(value) if np.isfinite(value) else "–"
        colour = "black" if _luminance(red, green, blue) > 0.179 else "white"
        axes.text(column, row, text, ha="center", va="center", fontsize=7.5, color=colour)


def _luminance(red: float, green: float, blue: float) -> float:
    """Return the relative luminance of a colour (WCAG 2): above 0.179 black text has the higher contrast."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))
