"""Grid figures: one number for every head of every layer."""

from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from saccade.support.argument_hints import argument_hints
from saccade.support.columns import display_width
from saccade.support.errors import type_error, value_error
from saccade.viz.arrays import Array, as_matrix, as_numbers, contrast_limits
from saccade.viz.canvas import INK, Canvas, blank, colours
from saccade.viz.titles import short_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# In pixels: a cell, the gap between grids, the space above a grid for its name, and to its left and below for numbers.
_CELL, _GAP, _NAME, _SIDE, _BELOW = 30, 24, 34, 30, 30
_UNNAMED = 8  # pixels above a grid without a name
_LARGEST = 64  # size to which cells may grow if there are few heads, so that names fit
_WIDEST = 1400
_LONG = 1000  # from this number on, the ends of a scale are written as whole numbers
_WIDEST_NUMBER = 40  # pixels for a head's number, with margin
_BESIDE, _BAR, _DIGIT = 8, 10, 9  # pixels: distance and width of a colour bar, width of a digit beside it
_ONE_DIGIT = 10  # heads whose numbers have one digit, which fits any cell
_COLUMN = 10  # pixels of one column of text in a name


@argument_hints({})
def head_grid(
    values: object, *, title: str | None = None, limits: tuple[float, float] | None = None, shared_scale: bool = False
) -> "Figure":
    """Draw a grid with one cell per head (rows are layers, columns are heads), or several such grids side by side.

    Each grid has its own colour scale, with a bar next to it. The scale starts at 0, or at the smallest number if that
    is above half of the largest. If any number is below 0, it is symmetric around 0. With ``shared_scale`` or
    ``limits``, equal colours mean equal numbers in all grids. NaN is grey.

    Args:
        values: ``[layers, heads]``, or a mapping from names to such arrays (tensors, arrays or nested lists) of equal
            shape.
        title: text above the figure.
        limits: the values at the two ends of all colour scales; computed from ``values`` if None.
        shared_scale: whether all grids share one colour scale.

    Returns:
        A figure that pyplot does not manage: it is not shown automatically and need not be closed. `save` writes it.

    Raises:
        TypeError: the values are not real numbers.
        ValueError: the values are not ``[layers, heads]``, differ in shape, or are not finite anywhere.
        ImportError: matplotlib is not installed.

    Cost: O(layers * heads) for each grid.
    """
    grids = _grids_by_name(values)
    layers, heads = next(iter(grids.values())).shape
    everything = np.stack(list(grids.values()))
    canvas = blank()
    ends = {name: contrast_limits(everything if shared_scale else grid, limits) for name, grid in grids.items()}
    name_width = max(display_width(name) * _COLUMN for name in grids)
    cell = min(max(_CELL, name_width // heads), _LARGEST)
    height, width = layers * cell, heads * cell
    end_labels = {name: [f"{end:,.0f}" if abs(end) >= _LONG else f"{end:.3g}" for end in ends[name]] for name in grids}
    beside = _BESIDE + _BAR + 6 + max(len(end) for labels in end_labels.values() for end in labels) * _DIGIT
    above = _NAME if any(grids) else _UNNAMED
    pitch = (height + above + _BELOW, max(width + beside, name_width) + _SIDE + _GAP)
    columns = min(len(grids), max(1, _WIDEST // pitch[1]))
    columns = ceil(len(grids) / ceil(len(grids) / columns))  # make the last row as long as possible
    sheet = np.ones((ceil(len(grids) / columns) * pitch[0], columns * pitch[1], 3))
    for number, (name, grid) in enumerate(grids.items()):
        row, column = divmod(number, columns)
        top, left = row * pitch[0] + above, column * pitch[1] + _SIDE
        low, high = ends[name]
        palette = colours(signed=low < 0)
        cells = palette((grid - low) / (high - low))[..., :3].repeat(cell, 0).repeat(cell, 1)
        cells[::cell] = cells[:, ::cell] = 0.9
        sheet[top : top + height, left : left + width] = cells
        bar = left + width + _BESIDE
        sheet[top : top + height, bar : bar + _BAR] = palette(np.linspace(1.0, 0.0, height))[:, None, :3]
        for end, y, side in zip(end_labels[name], (top + height, top), ("bottom", "top"), strict=True):
            canvas.axes.text(bar + _BAR + 5, y, end, size=7.5, va=side, color=INK)
        canvas.write(left, top - 8, name, size=9, va="bottom")
        _label_axes(canvas, (layers, heads), cell, top, left)
    return canvas.show_pixels(sheet, title)


def _label_axes(canvas: Canvas, shape: tuple[int, int], cell: int, top: int, left: int) -> None:
    """Write layer numbers to the left of a head grid and head numbers below it, skipping some if there are many."""
    layers, heads = shape
    for layer in range(0, layers, _label_interval(layers, 1)):
        y = top + (layer + 0.5) * cell
        canvas.write(left - 5, y, short_name(layer=layer), size=7.5, ha="right", va="center")
    for head in range(0, heads, _label_interval(heads, 1 if cell > _WIDEST_NUMBER or heads <= _ONE_DIGIT else 2)):
        x = left + (head + 0.5) * cell
        canvas.write(x, top + layers * cell + 4, short_name(head=head), size=7.5, ha="center", va="top")


def _grids_by_name(values: object) -> dict[str, Array]:
    given = values if isinstance(values, Mapping) else {"": values}
    if not given:
        raise value_error("values", "contain at least one grid", "none")
    grids: dict[str, Array] = {}
    for name, grid in given.items():
        if not isinstance(name, str):
            raise type_error("values", "have names that are strings", type(name).__name__)
        array = as_numbers("values", grid)
        if array.ndim != 2:
            raise value_error("values", "be [layers, heads]", f"shape {list(array.shape)}")
        grids[name] = as_matrix(array)
    shapes = {grid.shape for grid in grids.values()}
    if len(shapes) > 1:
        raise value_error("values", "all be of one shape", sorted(shapes))
    return grids


def _label_interval(count: int, least: int) -> int:
    """Return the interval between numbered rows or columns of a head grid.

    It is ``least`` for at most 16 rows or columns, and 4 for more.
    """
    return least if count <= 16 else 4
