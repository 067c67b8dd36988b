"""RowOrder: reorder the rows of a grid mask so that the cells of each square are adjacent."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from saccade.masks.algebra import After
from saccade.masks.grid.grid import Cells, Grid, Hulls, Squares
from saccade.masks.mask import Mask
from saccade.plan import Box, Groups
from saccade.plan.key_ranges import Bounds, Ints, KeyDomain, Spans


class GridSize(NamedTuple):
    """The size of a grid, and the number of positions before its first cell."""

    height: int
    width: int
    before: int


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """An order of rows in which the grid cells of a square are adjacent. Rows before and after the grid do not move.

    Args:
        grid_size: size and offset of the grid.
        squares: the division of the grid into squares.
        q_first: position of the first row; the positions of the rows are consecutive.
        q_len: number of rows.
    """

    grid_size: GridSize
    squares: Squares
    q_first: int
    q_len: int

    @property
    def rows(self) -> Ints:
        """Original row at each index of the row order, int64 ``[q_len]``."""
        return _tables(self).rows

    @property
    def places(self) -> Ints:
        """Index of each original row in the row order, int64 ``[q_len]``."""
        return _tables(self).places


class _Tables(NamedTuple):
    """Tables that describe a row order, mostly indexed by the new index of a row."""

    positions: Ints
    rows: Ints
    places: Ints
    top: Ints
    """Grid row of each cell, for minima; a number beyond the grid for rows without a cell."""
    bottom: Ints
    """Grid row of each cell, for maxima; -1 for rows without a cell."""
    left: Ints
    right: Ints
    edges: Ints
    """Indices in the row order where squares begin."""
    shapes: tuple[bytes, ...]
    """Displacements of each square's cells from its first cell, as bytes, because bytes cache their hash."""


@lru_cache(maxsize=64)
def _tables(order: RowOrder) -> _Tables:
    """Compute the tables that describe the rows of a row order."""
    (height, width, before), squares = order.grid_size, order.squares
    positions = np.arange(order.q_first, order.q_first + order.q_len)
    cell = positions - before
    on_grid = (cell >= 0) & (cell < height * width)
    y, x = np.divmod(np.where(on_grid, cell, 0), width)
    square_y = np.floor_divide(y - squares.top, squares.height)
    square_x = np.floor_divide(x - squares.left, squares.width)
    region = np.where(on_grid, 0, np.sign(cell))
    order_of_rows = np.lexsort((positions, square_x, square_y, region))
    positions, y, x = (a[order_of_rows] for a in (positions, y, x))
    on_grid = on_grid[order_of_rows]
    names = np.stack([a[order_of_rows] for a in (region, square_y, square_x)])
    edges = np.flatnonzero(np.concatenate([[True], (names[:, 1:] != names[:, :-1]).any(0)]))
    shapes, known = [], dict[bytes, bytes]()
    for start, stop in zip(edges, np.append(edges[1:], len(y)), strict=True):
        shape = np.stack([y[start:stop] - y[start], x[start:stop] - x[start]]).tobytes()
        shapes.append(known.setdefault(shape, shape))
    far = np.where(on_grid, 0, height + width)
    near = np.where(on_grid, 0, -1)
    return _Tables(
        positions,
        order_of_rows,
        np.argsort(order_of_rows),
        np.where(on_grid, y, far),
        np.where(on_grid, y, near),
        np.where(on_grid, x, far),
        np.where(on_grid, x, near),
        edges,
        tuple(shapes),
    )


@dataclasses.dataclass(frozen=True)
class InOrder(Mask):
    """A mask whose queries are reordered and indexed from 0 in the new order. Keys keep their positions.

    Args:
        mask: the mask on positions.
        order: the order of the rows.
    """

    mask: Mask
    order: RowOrder

    @property
    def made_of(self) -> tuple[Mask, ...]:
        return (self.mask,)

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        positions = torch.as_tensor(_tables(self.order).positions, device=q.device)
        return self.mask.allows(b, h, positions[q], kv)

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        tables = _tables(self.order)
        grid = self._grid()
        if grid is None:
            first = _extreme_per_group(np.minimum, tables.positions, groups.first, groups.last)
            last = _extreme_per_group(np.maximum, tables.positions, groups.first, groups.last)
            return self.mask.bounds(Groups(groups.batch, first, last), keys)
        before = self.order.grid_size.before
        local = KeyDomain(*(np.maximum(edge - before, 0) for edge in keys))
        inner = grid.bounds_of(_hulls(_tables(self.order), groups.first, groups.last), local)
        offset = np.full_like(groups.first, before)
        any_row = inner.any_row.shifted(offset, keys)
        if inner.is_exact:
            return Bounds.exactly(any_row)
        # A few keys visible to all rows save nothing, since they would split the residual mask into more segments.
        is_worth = 2 * inner.all_rows.sizes() >= inner.any_row.sizes()
        return Bounds(any_row, inner.all_rows.shifted(offset, keys).where(is_worth, Spans.nothing(keys)))

    def partial(self, box: Box) -> bool | Hashable:
        grid = self._grid()
        if grid is None:
            positions = _tables(self.order).positions[box.rows[0] : box.rows[-1] + 1]
            hull = range(int(positions.min()), int(positions.max()) + 1)
            partial = self.mask.partial(Box(box.batch, hull, box.keys))
            return partial if isinstance(partial, bool) else super().partial(box)
        before = self.order.grid_size.before
        if box.keys[0] < before:
            return super().partial(box) if box.keys[-1] >= before else False
        keys = range(box.keys.start - before, box.keys.stop - before, box.keys.step)
        return grid.residual_of(_cells(self.order, box.rows), keys)

    def cuts(self, batch: int, rows: range) -> Ints:
        return _tables(self.order).edges

    def __repr__(self) -> str:
        return str(self.mask)

    def _grid(self) -> Grid | None:
        """Return the mask if it is a `Grid` on the same grid as the row order; None otherwise."""
        grid, grid_size = _grid_of(self.mask)
        return grid if grid_size == self.order.grid_size else None


def _hulls(tables: _Tables, first: Ints, last: Ints) -> Hulls:
    """Return the hulls of the grid cells at indices ``first`` to ``last`` (inclusive) in a row order."""
    top, left = (_extreme_per_group(np.minimum, edge, first, last) for edge in (tables.top, tables.left))
    bottom, right = (_extreme_per_group(np.maximum, edge, first, last) for edge in (tables.bottom, tables.right))
    some = bottom >= 0
    every = _extreme_per_group(np.minimum, tables.bottom, first, last) >= 0
    top, bottom, left, right = (np.where(some, edge, 0) for edge in (top, bottom, left, right))
    return Hulls(top, bottom, left, right, some, every)


@lru_cache(maxsize=256)
def _cells(order: RowOrder, rows: range) -> Cells:
    """Return the grid cells of a tile's reordered rows, cached because a tile has several key ranges."""
    tables = _tables(order)
    hull = _hulls(tables, np.asarray([rows[0]]), np.asarray([rows[-1]]))
    square = int(np.searchsorted(tables.edges, rows[0], side="right")) - 1
    start = int(tables.edges[square])
    stop = int(tables.edges[square + 1]) if square + 1 < len(tables.edges) else order.q_len
    place = (order, rows)
    pattern = (tables.shapes[square], rows.start - start, rows.step, len(rows)) if rows[-1] < stop else place
    first = (int(tables.top[rows[0]]), int(tables.left[rows[0]]))
    return Cells(hull.first_ends, bool(hull.all[0]), first, pattern, place)


def in_order(mask: Mask, order: RowOrder) -> Mask:
    """Return the mask with its rows in the given order. The parts of a combined mask are reordered separately."""
    return mask.with_atoms(lambda atom: InOrder(atom, order))


def wanted_order(mask: Mask, q_first: int, q_len: int) -> RowOrder | None:
    """Return the row order that suits the first grid mask within a mask; None if there is none.

    The rows have ``q_len`` consecutive positions, starting at ``q_first``.
    """
    for atom in mask.atoms():
        grid, grid_size = _grid_of(atom)
        if grid is not None and grid_size is not None and grid.squares is not None:
            return RowOrder(grid_size, grid.squares, q_first, q_len)
    return None


def _grid_of(mask: Mask) -> tuple[Grid, GridSize] | tuple[None, None]:
    """Return the grid mask within a possibly shifted mask, and its size and offset; (None, None) if there is none."""
    grid, before = (mask.rule, mask.length) if isinstance(mask, After) else (mask, 0)
    return (grid, GridSize(grid.height, grid.width, before)) if isinstance(grid, Grid) else (None, None)


def _extreme_per_group(function: np.ufunc, values: Ints, first: Ints, last: Ints) -> Ints:
    """Return the minimum or maximum of ``values[first:last + 1]`` for each group of reordered rows."""
    edges = np.stack([first, last + 1], axis=-1).ravel()
    padded = np.append(values, values[-1:])  # an end may be after the last row
    reduced: Ints = function.reduceat(padded, edges)[::2]
    return reduced
