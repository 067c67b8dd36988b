"""Axial: a mask that lets each cell of a grid see its row, its column, or both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from saccade.masks.grid.grid import Grid, Rectangle, Squares, check_grid
from saccade.masks.mask import Mask
from saccade.plan.key_ranges import Ints
from saccade.support.validation import check_choice


@dataclasses.dataclass(frozen=True)
class Axial(Grid):
    r"""A mask on a grid: a cell sees its row, its column, or both.

    Position p is the cell in row ``p // width`` and column ``p % width``, for queries and keys. Positions outside the
    grid attend to nothing and are never visible. On a grid of 3 rows and 5 columns, the centre sees these cells:

    >>> for axis in ("rows", "columns", "both"):
    ...     seen = Axial(3, 5, axis).to_dense(15)[0, 0, 7].view(3, 5).tolist()
    ...     print("\n".join(" ".join(".1"[see] for see in row) for row in seen), end="\n\n")
    . . . . .
    1 1 1 1 1
    . . . . .
    <BLANKLINE>
    . . 1 . .
    . . 1 . .
    . . 1 . .
    <BLANKLINE>
    . . 1 . .
    1 1 1 1 1
    . . 1 . .
    <BLANKLINE>

    Args:
        height, width: rows and columns of the grid, ints of at least 1.
        axis: "rows" (a cell sees its row), "columns" (its column), or "both" (the cross).

    Raises:
        ValueError: an argument does not meet the conditions above.

    Cost: ``width``, ``height`` or ``height + width - 1`` keys per query. Columns are processed as views of every
    width-th row and key, without copies, and merged with the result of the rows using their log-sum-exp (lse).

    Reference: Ho et al. 2019, arXiv:1912.12180, section 3 (alternating rows and columns); Huang et al. 2019, "CCNet",
    arXiv:1811.11721, section 3.2 (criss-cross: both together).
    """

    height: int
    width: int
    axis: Literal["rows", "columns", "both"] = "both"
    depends_on_displacement = True

    def __post_init__(self) -> None:
        check_grid(self)
        check_choice("axis", self.axis, ("rows", "columns", "both"))

    @property
    def squares(self) -> Squares | None:
        return Squares(8, 8) if self.axis == "both" else None

    def _visible_rectangles(self, y: Any, x: Any) -> Sequence[Rectangle]:
        row = Rectangle(y, y + 1, x - x, x - x + self.width)
        column = Rectangle(y - y, y - y + self.height, x, x + 1)
        return {"rows": [row], "columns": [column], "both": [row, column]}[self.axis]

    def cuts(self, batch: int, rows: range) -> Ints:
        cells = self.height * self.width
        return np.arange(0, min(cells, max(rows.stop, 0)) + 1, cells if self.axis == "columns" else self.width)

    def terms(self) -> Sequence[tuple[int, Mask]]:
        if self.width == 1 or self.axis == "rows":
            return [(1, self)]
        columns = dataclasses.replace(self, axis="columns")
        if self.axis == "columns":
            return [(self.width, columns)]
        rows = dataclasses.replace(self, axis="rows")
        return [(1, rows), (self.width, columns & ~rows)]
