"""ShiftedWindows: a mask that divides a grid into windows, as in Swin."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from saccade.masks.grid.grid import Grid, Rectangle, Squares, check_grid
from saccade.masks.mask_fields import SIZE_BITS, check_field
from saccade.plan.key_ranges import Ints
from saccade.support.errors import value_error


@dataclasses.dataclass(frozen=True)
class ShiftedWindows(Grid):
    r"""A mask on a grid divided into windows: a cell sees the cells of its window.

    Position p is the cell in row ``p // width`` and column ``p % width``, for queries and keys. Positions outside the
    grid attend to nothing and are never visible.

    Swin shifts the grid cyclically by ``shift`` cells, divides it into windows, and separates cells that are in one
    window only because of the shift. This is equivalent to windows that begin at ``shift`` instead of 0, with smaller
    windows at all four borders, so no cell has to be moved. Equal letters mark the cells of a window:

    >>> seen = ShiftedWindows(4, 6, 2, shift=1).to_dense(24)[0, 0]
    >>> first = seen.int().argmax(1)  # the first cell that each cell sees
    >>> names = {cell: "abcdefghijkl"[i] for i, cell in enumerate(first.unique().tolist())}
    >>> print("\n".join(" ".join(names[cell] for cell in row) for row in first.view(4, 6).tolist()))
    a b b c c d
    e f f g g h
    e f f g g h
    i j j k k l

    Args:
        height, width: rows and columns of the grid, ints of at least 1. If they are not multiples of ``window``, the
            last windows are smaller; Swin's code pads the grid there, and lets cells see the padding.
        window: rows and columns of a window, an int of at least 1.
        shift: rows and columns before the first complete window, an int of at least 0 and below ``window``. In every
            other layer of Swin, it is half a window, or 0 if one window covers the entire grid.

    Raises:
        ValueError: an argument does not meet the conditions above.

    Cost: ``window ** 2`` keys per query; rows are processed window by window if that is cheaper.

    Reference: Liu et al. 2021, arXiv:2103.14030, section 3.2 and figure 4.
    """

    height: int
    width: int
    window: int
    shift: int = 0
    depends_on_displacement = False

    def __post_init__(self) -> None:
        check_grid(self)
        check_field(self, "window", 1, bits=SIZE_BITS)
        check_field(self, "shift", 0, bits=SIZE_BITS)
        if self.shift >= self.window:
            raise value_error("shift", f"be below window {self.window}", self.shift)

    @property
    def squares(self) -> Squares | None:
        return Squares(self.window, self.window, self.shift, self.shift)

    def _visible_rectangles(self, y: Any, x: Any) -> Sequence[Rectangle]:
        top, left = ((c - self.shift) // self.window * self.window + self.shift for c in (y, x))
        return [Rectangle(top, top + self.window, left, left + self.window)]

    def cuts(self, batch: int, rows: range) -> Ints:
        edges = np.arange(self.shift, min(self.height, rows.stop // self.width + 1), self.window)
        return np.concatenate([edges, [self.height]]) * self.width
