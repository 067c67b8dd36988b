"""Heatmaps of a single matrix, with queries as rows and keys as columns."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from saccade.masks import Mask
from saccade.matrix import Matrix
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import value_error
from saccade.viz.arrays import Array, as_matrix, masked, max_pool, scale_of
from saccade.viz.canvas import DPI, Canvas, blank, colours, whole_pixels
from saccade.viz.mask_maps import matrix_of_mask, refuse_lengths, refuse_with_mask, visible_cells
from saccade.viz.pooled_maps import check_batch_and_head, check_no_lazy_options, map_of, position_labels
from saccade.viz.ticks import KEY, QUERY, WEIGHT, check_labels, name_axis, name_columns, name_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

ANNOTATED_AT_MOST = 40  # maximum number of rows or columns of a map with numbers in its cells
_LONGEST, _PLAIN = 9.0, 5.0  # inches: longest side of the map, with labels and without
_SHORTEST = 0.9  # inches: minimum length of the shorter side
_LINES = "#e4e4e9"  # colour of the lines between cells
_DARK = 0.3  # luminance below which text is white, with a contrast of at least 3 : 1; black on dark red is hard to read
_VISIBLE = 1.5  # upper end of a mask's scale, on which allowed pairs have the value 1


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
    subtitle: str | None = None,
    x_name: str = KEY,
    y_name: str = QUERY,
    scale_name: str | None = None,
    limits: tuple[float, float] | None = None,
    allowed: object = None,
    log: bool = False,
    q_len: int | None = None,
    kv_len: int | None = None,
) -> "Figure":
    """Draw a dense or lazy matrix of any length as a heatmap, with queries as rows from the top and keys as columns.

    A mask can also be drawn: the pairs that it allows are shown in one colour, and all other pairs are grey.

    If there are more cells than pixels, each pixel shows the value farthest from 0 in a group of neighbours, so that a
    thin diagonal or a single bright key stays visible. Axes and labels still count rows and columns of the matrix.

    A weight of 0 is white, and if there are numbers below 0, the scale is symmetric around 0. NaN, infinite entries and
    pairs that are not allowed are grey. For a lazy matrix (`saccade.AttentionMatrix` or any other
    `saccade.matrix.Matrix`), only the drawn cells are stored. Masked pairs are grey, and without labels, the axes show
    token positions.

    Sinks (keys that receive most of the attention of most queries) do not affect the colour scale. Without ``limits``,
    the scale ends at the largest weight of 95 % of the queries, ignoring sinks, if that is below half of the largest
    weight. Larger values get the last colour, and an arrow on the scale shows the largest value.

    Args:
        weights: a lazy matrix, or ``[q_len, kv_len]``: a tensor of any dtype and device, an array, or nested lists; or
            a mask, such as ``masks.Causal()``.
        head, batch: the head and batch item of a lazy matrix to draw; other heads and batch items are not computed. A
            matrix with a single head needs no ``head``.
        x_labels: one label per key, shown literally, without math mode; only as many as fit are drawn. Long labels
            are cut. A label with a character that no installed font supports is replaced by its number, counted from 1:
            ``#4``.
        y_labels: one label per query.
        annotate: whether to write every value into its cell; for at most 40 rows and 40 columns. The cell of a value
            that would be written as 0.00 stays empty.
        title: text above the figure.
        subtitle: smaller text below the title.
        x_name: name of the columns.
        y_name: name of the rows.
        scale_name: name of the values, written next to the colour scale; "weight" if None, and "" for no name.
        limits: the values at the two ends of the colour scale; computed from the matrix if None.
        allowed: bool, broadcastable to the weights: the visible pairs; all if None. Not needed for a lazy matrix, which
            has a mask.
        log: whether the colour scale is logarithmic, over four decades or ``limits``; smaller values are white. This
            makes other weights visible if there is a strong sink.
        q_len, kv_len: numbers of queries and keys, for a mask. If None, they are taken from the labels or the mask, or
            are 32.

    Returns:
        A figure that pyplot does not manage: it is not shown automatically and need not be closed. `save` writes it.

    Raises:
        TypeError: ``weights`` are not real numbers, or the labels are a single string.
        ValueError: the weights are not a matrix, none is finite, the number of labels is wrong, or the head does not
            exist.
        ImportError: matplotlib is not installed.

    Cost: O(q_len * kv_len) time, and as much memory for dense weights; a lazy matrix takes one pass over one head and
    O(q_len + kv_len) memory.
    """
    is_mask = isinstance(weights, Mask)
    if isinstance(weights, Mask):
        refuse_with_mask(annotate=annotate, scale_name=scale_name, limits=limits, allowed=allowed, log=log)
        weights = matrix_of_mask(weights, q_len, kv_len, x_labels, y_labels)
    else:
        refuse_lengths(q_len=q_len, kv_len=kv_len)
    if isinstance(weights, Matrix):
        item, head_index = check_batch_and_head(weights, batch, head)
        if allowed is not None:
            raise value_error("allowed", "be omitted for a lazy matrix, which has its own mask", "a mask")
        shape = weights.shape[2:]
    else:
        check_no_lazy_options(head=head, batch=batch)
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
        matrix = as_matrix(map_of(weights, item, head_index, max(pixels)))
        rows, columns = position_labels(weights, item)
    cells = max_pool(matrix, *pixels)
    if is_mask:
        _draw_cells(canvas, visible_cells(cells), shape, (0.0, _VISIBLE, False), log=False, scale_name=None)
    else:
        scale = scale_of(cells, limits, log=log)
        image = _draw_cells(
            canvas, cells, shape, scale, log=log, scale_name=WEIGHT if scale_name is None else scale_name
        )
    name_columns(canvas.axes, x_labels, x_name, shape[1], width, columns)
    name_rows(canvas.axes, y_labels, y_name, shape[0], height, rows)
    if annotate:
        _draw_values(canvas.axes, image, cells)
    return canvas.finished(width, height, title, subtitle)


def draw_cell_lines(axes: "Axes", rows: int, columns: int) -> None:
    """Draw a frame around a heatmap, and lines between its cells if there are few."""
    # Draw the frame below the image, so that it does not cover the outermost pixels.
    axes.spines[:].set(color=_LINES, linewidth=1.2, zorder=-1)
    if max(rows, columns) <= ANNOTATED_AT_MOST:
        axes.set_xticks(np.arange(1, columns) - 0.5, minor=True)
        axes.set_yticks(np.arange(1, rows) - 0.5, minor=True)
        axes.grid(which="minor", color=_LINES, linewidth=0.8)
        axes.tick_params(which="minor", length=0)


def _size(shape: tuple[int, int], annotate: bool, labelled: bool) -> tuple[float, float]:
    """Return a heatmap's width and height in inches, rounded to whole pixels.

    Cells are square, unless the heatmap would then be too thin.
    """
    rows, columns = shape
    longer = max(rows, columns)
    # Inches of a cell, and limit for the longer side. Annotated maps have a limited number of cells instead.
    cell, most = (0.44, np.inf) if annotate else (0.34, _LONGEST) if labelled else (0.6, _PLAIN)
    side = min(longer * cell, most) / longer
    width, height = max(columns * side, _SHORTEST), max(rows * side, _SHORTEST)
    return whole_pixels(width), whole_pixels(height)


def _draw_cells(
    canvas: Canvas,
    cells: Array,
    shape: tuple[int, int],
    scale: tuple[float, float, bool],
    *,
    log: bool,
    scale_name: str | None,
) -> "AxesImage":
    """Draw the cells of a heatmap and, unless ``scale_name`` is None, the colour scale next to it."""
    from matplotlib.colors import LogNorm, Normalize  # noqa: PLC0415  matplotlib is optional

    (rows, columns), (low, high, has_larger), axes = shape, scale, canvas.axes
    image = axes.imshow(
        # Values below a logarithmic scale get its lowest colour, because grey marks masked cells.
        np.maximum(cells, low) if log else cells,
        cmap=colours(signed=low < 0),
        norm=(LogNorm if log else Normalize)(low, high),
        aspect="auto",
        interpolation="nearest",
        # The axes count rows and columns of the unpooled matrix.
        extent=(-0.5, columns - 0.5, rows - 0.5, -0.5),
    )
    draw_cell_lines(axes, rows, columns)
    if scale_name is not None:
        bar = canvas.add_scale(image, float(np.fmax.reduce(cells, axis=None)) if has_larger else None)
        name_axis(bar.yaxis, scale_name)
    return image


def _draw_values(axes: "Axes", image: "AxesImage", matrix: Array) -> None:
    """Write each value of a heatmap into its cell, in white where that is readable and otherwise in black.

    A cell whose value rounds to 0 stays empty.
    """
    pattern = "{:.2f}" if np.nanmax(np.abs(matrix)) < 10 else "{:.3g}"
    for (row, column), value in np.ndenumerate(matrix):
        red, green, blue, _ = image.to_rgba(np.array([value]))[0]
        text = pattern.format(value) if np.isfinite(value) else "–"
        if np.isfinite(value) and float(text) == 0:
            continue
        colour = "white" if _luminance(red, green, blue) < _DARK else "black"
        axes.text(column, row, text, ha="center", va="center", fontsize=7.5, color=colour)


def _luminance(red: float, green: float, blue: float) -> float:
    """Return the relative luminance of a heatmap colour, as defined by WCAG 2."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))
