"""Grid: base class of masks on a grid, whose cells are numbered row by row."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from saccade.masks.mask import Domain, Mask
from saccade.masks.mask_fields import SIZE_BITS, check_field
from saccade.plan import Box, Groups
from saccade.plan.key_ranges import Bounds, Ints, KeyDomain, Spans
from saccade.support.errors import value_error

_MAX_RANGES = 1 << 22  # limit over all groups; beyond it, the keys of each group are a single range


class Rectangle(NamedTuple):
    """The grid cells with ``top <= y < bottom`` and ``left <= x < right``; the edges are ints, arrays or tensors."""

    top: Any
    bottom: Any
    left: Any
    right: Any


class Hulls(NamedTuple):
    """The bounding rectangles of groups of grid cells: smallest and largest rows and columns, int64 ``[groups]``.

    ``some`` marks groups with at least one cell on the grid; ``all`` marks groups with all cells on the grid.
    """

    @property
    def first_ends(self) -> tuple[int, int, int, int] | None:
        """Top, bottom, left and right of the first group's hull; None if the group contains no grid cell."""
        if not self.some[0]:
            return None
        return int(self.top[0]), int(self.bottom[0]), int(self.left[0]), int(self.right[0])

    top: Ints
    bottom: Ints
    left: Ints
    right: Ints
    some: npt.NDArray[np.bool_]
    all: npt.NDArray[np.bool_]


class Cells(NamedTuple):
    """The grid cells that belong to the rows of a box.

    Attributes:
        ends: top, bottom, left and right of the cells on the grid (inclusive); None if there are no cells.
        all: whether all rows are on the grid.
        first: grid row and column of the first cell.
        pattern: hash key of the cells' displacements from the first cell.
        place: hash key of the cells themselves.
    """

    ends: tuple[int, int, int, int] | None
    all: bool
    first: tuple[int, int]
    pattern: Hashable
    place: Hashable


class Squares(NamedTuple):
    """A division of a grid into rectangles. Row y is in rectangle row ``(y - top) // height``; likewise for columns."""

    height: int
    width: int
    top: int = 0
    left: int = 0


class Grid(Mask):
    """Base class of masks on a grid: position p is the cell in row ``p // width`` and column ``p % width``.

    A subclass defines `_visible_rectangles`, the rectangles of keys that a cell sees. All other methods use it. Queries
    and keys are on the same grid; positions outside it attend to nothing and are never visible.
    """

    height: int
    width: int

    @abstractmethod
    def _visible_rectangles(self, y: Any, x: Any) -> Sequence[Rectangle]:
        """Return the rectangles of the grid that the cell (y, x) sees; y and x are ints, arrays or tensors.

        Rectangles may extend beyond the grid. Each edge must be nondecreasing in y and x.
        """

    @property
    @abstractmethod
    def depends_on_displacement(self) -> bool:
        """Whether the grid mask depends only on the displacement between two cells."""

    @property
    def squares(self) -> Squares | None:
        """Division of the grid into rectangles whose cells see similar keys; None to keep the order of the rows."""
        return None

    @property
    def domain(self) -> Domain:
        return Domain(range(self.height * self.width), range(self.height * self.width))

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        cells, width = self.height * self.width, self.width
        here = (q >= 0) & (q < cells) & (kv >= 0) & (kv < cells)
        y, x = kv.div(width, rounding_mode="floor"), kv % width
        allowed = q != q
        for top, bottom, left, right in self._visible_rectangles(q.div(width, rounding_mode="floor"), q % width):
            allowed = allowed | ((y >= top) & (y < bottom) & (x >= left) & (x < right))
        return allowed & here

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        return self.bounds_of(_hulls(self.height, self.width, groups.first, groups.last), keys)

    def bounds_of(self, hulls: Hulls, keys: KeyDomain) -> Bounds:
        """Return the `bounds` of the mask for groups of grid cells with the given hulls."""
        bounds = Bounds.exactly(Spans.nothing(keys))
        on_or_off = bool((hulls.all | ~hulls.some).all())
        for low, high in self._ends(hulls):
            some = Rectangle(low.top, high.bottom, low.left, high.right)
            every = Rectangle(high.top, low.bottom, high.left, low.right)
            any_row, all_rows = self._spans(some, hulls.some, keys), Spans.nothing(keys)
            if any_row is None:
                any_row = self._one_range(some, hulls.some, keys)
            elif on_or_off and all(np.array_equal(a, b) for a, b in zip(some, every, strict=True)):
                all_rows = any_row
            else:
                all_rows = self._spans(every, hulls.all, keys) or all_rows
            bounds = bounds.either(Bounds(any_row, all_rows), keys)
        return bounds

    def partial(self, box: Box) -> bool | Hashable:
        return self.residual_of(_cells(self.height, self.width, box.rows), box.keys)

    def residual_of(self, cells: Cells, keys: range) -> bool | Hashable:
        """Return the result of `partial` for arbitrary grid cells instead of a range of rows."""
        least, most = max(keys[0], 0), min(keys[-1], self.height * self.width - 1)
        if least > most or cells.ends is None:
            return False
        top, bottom = least // self.width, most // self.width
        left, right = (least % self.width, most % self.width) if top == bottom else (0, self.width - 1)
        is_inside = cells.all and least == keys[0] and most == keys[-1]
        y, last_y, x, last_x = cells.ends
        touched = False
        for low, high in zip(self._visible_rectangles(y, x), self._visible_rectangles(last_y, last_x), strict=True):
            covers = high.top <= top and bottom < low.bottom and high.left <= left and right < low.right
            if covers and is_inside:
                return True
            touched |= low.top <= bottom and top < high.bottom and low.left <= right and left < high.right
        if not touched:
            return False
        if not (is_inside and self.depends_on_displacement):
            return (self, cells.place, keys)
        displacement = (top - cells.first[0], keys[0] % self.width - cells.first[1])
        crosses_rows = None if top == bottom else keys[0] % self.width
        return (self, cells.pattern, displacement, keys.step, len(keys), crosses_rows)

    def _ends(self, hulls: Hulls) -> list[tuple[Rectangle, Rectangle]]:
        """Return the grid rectangles that are visible from the first corner and from the last corner of each hull."""
        firsts, lasts = (
            self._visible_rectangles(hulls.top, hulls.left),
            self._visible_rectangles(hulls.bottom, hulls.right),
        )
        return [(self._clipped(low), self._clipped(high)) for low, high in zip(firsts, lasts, strict=True)]

    def _clipped(self, r: Rectangle) -> Rectangle:
        top, bottom = (np.clip(edge, 0, self.height) for edge in (r.top, r.bottom))
        left, right = (np.clip(edge, 0, self.width) for edge in (r.left, r.right))
        return Rectangle(top, bottom, left, right)

    def _spans(self, r: Rectangle, which: npt.NDArray[np.bool_], keys: KeyDomain) -> Spans | None:
        """Return the keys in a grid rectangle as one range per row, for the groups in ``which``; None if too many."""
        count = np.where(which & (r.left < r.right), np.maximum(r.bottom - r.top, 0), 0)
        is_wide = (r.left == 0) & (r.right == self.width)
        ranges = np.where(is_wide, np.minimum(count, 1), count)
        most = int(ranges.max(initial=0))
        if most * len(count) > _MAX_RANGES:
            return None
        row = r.top[:, None] + np.arange(max(most, 1))
        starts = row * self.width + r.left[:, None]
        ends = np.where(is_wide[:, None], r.bottom[:, None] * self.width, row * self.width + r.right[:, None])
        return Spans.of(starts, np.where(np.arange(max(most, 1)) < ranges[:, None], ends, starts), keys)

    def _one_range(self, r: Rectangle, which: npt.NDArray[np.bool_], keys: KeyDomain) -> Spans:
        """Return the range from the first to the last key in a grid rectangle, for the groups in ``which``."""
        start, stop = r.top * self.width + r.left, (r.bottom - 1) * self.width + r.right
        return Spans.within(keys, start, np.where(which & (r.left < r.right) & (r.top < r.bottom), stop, 0))


def _hulls(height: int, width: int, first: Ints, last: Ints) -> Hulls:
    """Return the hulls of the cells at positions ``first`` to ``last`` (inclusive) of a grid."""
    start, stop = np.maximum(first, 0), np.minimum(last, height * width - 1)
    some = start <= stop
    start, stop = np.where(some, start, 0), np.where(some, stop, 0)
    top, bottom = start // width, stop // width
    together = top == bottom
    left = np.where(together, start % width, 0)
    right = np.where(together, stop % width, width - 1)
    return Hulls(top, bottom, left, right, some, (first >= 0) & (last < height * width))


@lru_cache(maxsize=256)
def _cells(height: int, width: int, rows: range) -> Cells:
    """Return the cells of a tile's rows on a grid, cached because a tile has several key ranges."""
    hull = _hulls(height, width, np.asarray([rows[0]]), np.asarray([rows[-1]]))
    y, x = divmod(rows[0], width)
    # The start column determines where the rows continue in the next row of the grid.
    crosses_rows = rows[-1] // width != y
    pattern = (rows.step, len(rows), x if crosses_rows else None)
    return Cells(hull.first_ends, bool(hull.all[0]), (y, x), pattern, rows)


def check_grid(grid: Grid) -> None:
    """Raise an error unless a grid's height and width are at least 1 and it has fewer than 2**40 cells.

    Raises:
        ValueError: the sizes are out of range.
    """
    check_field(grid, "height", 1, bits=SIZE_BITS)
    check_field(grid, "width", 1, bits=SIZE_BITS)
    height, width = grid.height, grid.width
    if height * width >> SIZE_BITS:
        raise value_error("height and width", f"make fewer than 2**{SIZE_BITS} cells", f"{height} and {width}")
