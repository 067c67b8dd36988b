"""Bipartite figures: two sequences side by side, with a line from each query to the keys it attends to."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from saccade.support.argument_hints import argument_hints
from saccade.support.columns import display_width
from saccade.support.errors import value_error
from saccade.support.language import translated
from saccade.support.validation import check_number
from saccade.viz.arrays import Array, as_matrix
from saccade.viz.canvas import PLAIN, blank, colours
from saccade.viz.fonts import drawable_labels
from saccade.viz.ticks import KEY, QUERY, check_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_WORDS = 80  # maximum number of words on either side
_LINE, _BETWEEN, _SIZE = 0.21, 2.6, 9.0  # inches: height of a line of text, gap between the columns; points: font size


@argument_hints({})
def bipartite(
    weights: object,
    *,
    y_labels: Sequence[str],
    x_labels: Sequence[str],
    least: float = 0.05,
    title: str | None = None,
    subtitle: str | None = None,
    y_name: str = QUERY,
    x_name: str = KEY,
) -> "Figure":
    """Draw queries on the left, keys on the right, and a line from each query to the keys it attends to.

    A line's darkness and width show its weight, from ``least`` (barely visible) to 1, so figures of different heads can
    be compared. The figure is designed for cross-attention between two texts.

    Args:
        weights: ``[q_len, kv_len]``, at most 80 in each direction: a tensor, an array or nested lists.
        y_labels: one label for each query, shown literally: dollar signs do not start math mode.
        x_labels: one label for each key.
        least: the smallest weight to draw, above 0 and below 1.
        title: text above the figure.
        subtitle: smaller text below the title.
        y_name: name of the queries.
        x_name: name of the keys.

    Returns:
        A figure that pyplot does not manage: it is not shown automatically and need not be closed. `save` writes it.

    Raises:
        TypeError: ``weights`` are not real numbers, or the labels are a single string.
        ValueError: the weights are not a matrix, there are too many words, the number of labels is wrong, or ``least``
            is out of range.
        ImportError: matplotlib is not installed.

    Cost: one line for each weight that is at least ``least``.
    """
    matrix = as_matrix(weights)
    if max(matrix.shape) > _MAX_WORDS:
        hint = "heatmap draws a matrix of any size"
        raise value_error("weights", f"have at most {_MAX_WORDS} rows and columns", list(matrix.shape), hint=hint)
    check_number("least", least, above=0.0, below=1.0)
    check_labels("y_labels", y_labels, matrix.shape[0], "queries")
    check_labels("x_labels", x_labels, matrix.shape[1], "keys")
    canvas = blank()
    height = max(matrix.shape)
    # Centre the shorter column.
    left, right = ((np.arange(count) + (height - count) / 2 + 0.5) for count in matrix.shape)
    _draw_lines(canvas.axes, matrix, least, left, right)
    for labels, ys, x, side in ((y_labels, left, -0.03, "right"), (x_labels, right, 1.03, "left")):
        shown, families = drawable_labels(labels)
        for label, y in zip(shown, ys, strict=True):
            canvas.axes.text(x, y, label, size=_SIZE, ha=side, va="center", family=families, **PLAIN)
    for name, x, side in ((y_name, -0.03, "right"), (x_name, 1.03, "left")):
        canvas.write(x, -0.6, translated(name), size=_SIZE, ha=side, va="center", style="italic")
    canvas.axes.set(xlim=(0, 1), ylim=(height, -1))
    canvas.axes.set_axis_off()
    widest = max(map(display_width, [*x_labels, *y_labels]))
    return canvas.finished(_BETWEEN, (height + 1) * _LINE, title, subtitle, title_width=_BETWEEN + 0.1 * widest)


def _draw_lines(axes: "Axes", matrix: Array, least: float, left: Array, right: Array) -> None:
    """Draw a bipartite figure's lines, one for each weight of at least ``least``, with the strongest on top."""
    from matplotlib.collections import LineCollection  # noqa: PLC0415  matplotlib is optional

    rows, columns = np.nonzero(np.nan_to_num(matrix) >= least)
    order = np.argsort(matrix[rows, columns])
    rows, columns = rows[order], columns[order]
    strength = (matrix[rows, columns].clip(least, 1.0) - least) / (1.0 - least)
    lines = [((0.0, left[row]), (1.0, right[column])) for row, column in zip(rows, columns, strict=True)]
    inks, widths = colours()(0.15 + 0.8 * strength), 0.4 + 3.2 * strength
    axes.add_collection(LineCollection(lines, colors=inks, linewidths=widths, capstyle="round"))
