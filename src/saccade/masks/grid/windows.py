"""ShiftedWindows: a grid cut into windows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from saccade.masks.grid.grid import Grid, Rectangle, Squares, check_grid
from saccade.masks.validation import SIZE_BITS, check_field
from saccade.plan.key_ranges import Ints
from saccade.support.errors import value_error

__all__ = ["ShiftedWindows"]


@dataclasses.dataclass(frozen=True)
class ShiftedWindows(Grid):
    r"""A grid is cut into windows, and a cell sees the cells of its own one.

    Position p is the cell in row ``p // width`` and column ``p % width``, for queries and keys alike; a position that
    is not on the grid sees nothing and is not seen.

    Swin shifts the grid cyclically by ``shift`` cells, cuts it into windows, and hides from each other the cells that
    only the shift has brought together. What remains is a cut into windows that begin at ``shift`` instead of 0, and
    smaller ones at all four borders; nothing has to be moved for it. The same letter is the same window:

    >>> seen = ShiftedWindows(4, 6, 2, shift=1).to_dense(24)[0, 0]
    >>> first = seen.int().argmax(1)  # the first cell that each cell sees
    >>> names = {cell: "abcdefghijkl"[i] for i, cell in enumerate(first.unique().tolist())}
    >>> print("\n".join(" ".join(names[cell] for cell in row) for row in first.view(4, 6).tolist()))
    a b b c c d
    e f f g g h
    e f f g g h
    i j j k k l

    Args:
        height, width: rows and columns of the grid, ints of at least 1. Where a window does not divide them, the last
            ones are smaller; Swin's code pads the grid there, and lets cells see the padding.
        window: rows and columns of a window, an int of at least 1.
        shift: rows and columns before the first whole window, an int of at least 0 and below ``window``; half a
            window in every other layer of Swin, but 0 where one window holds the whole grid.

    Raises:
        ValueError: anything else.

    Cost: ``window ** 2`` keys per query; products take their rows window by window where that is cheaper.

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

    def _sight(self, y: Any, x: Any) -> Sequence[Rectangle]:
        top, left = ((c - self.shift) // self.window * self.window + self.shift for c in (y, x))
        return [Rectangle(top, top + self.window, left, left + self.window)]

    def cuts(self, batch: int, rows: range) -> Ints:
        edges = np.arange(self.shift, min(self.height, rows.stop // self.width + 1), self.window)
        return np.concatenate([edges, [self.height]]) * self.width
