"""RowOrder: rows square by square instead of one after another; and any mask on rows in that order."""

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
from saccade.plan.key_ranges import Bounds, Ints, Spans, Universe

__all__ = ["InOrder", "RowOrder", "in_order", "wanted_order"]


class Grounds(NamedTuple):
    """Where a grid lies: its size, and how many positions stand before its first cell."""

    height: int
    width: int
    before: int


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """An order of rows in which the cells of a square follow one another; what is not on the grid stays at the ends.

    Args:
        grounds: the grid.
        squares: how it is cut.
        q_first: position of the first row; the others follow one by one.
        q_len: number of rows.
    """

    grounds: Grounds
    squares: Squares
    q_first: int
    q_len: int

    @property
    def rows(self) -> Ints:
        """Which row comes when, int64 ``[q_len]``."""
        return _made(self).rows

    @property
    def places(self) -> Ints:
        """Where each row went, int64 ``[q_len]``."""
        return _made(self).places


class _Made(NamedTuple):
    """What follows from an order, by the new number of a row."""

    positions: Ints
    rows: Ints
    places: Ints
    top: Ints
    """Row of the grid, or a number beyond it where there is no cell; for minima."""
    bottom: Ints
    """Row of the grid, or -1 where there is no cell; for maxima."""
    left: Ints
    right: Ints
    edges: Ints
    """Numbers at which squares begin."""
    shapes: tuple[bytes, ...]
    """For each of them, how its cells lie to its first one; bytes, since these keep their hash."""


@lru_cache(maxsize=64)
def _made(order: RowOrder) -> _Made:
    (height, width, before), squares = order.grounds, order.squares
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
    return _Made(
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
    """A mask whose queries are counted in another order, from 0; keys keep their positions.

    Args:
        mask: on positions.
        order: of the rows.
    """

    mask: Mask
    order: RowOrder

    @property
    def made_of(self) -> tuple[Mask, ...]:
        return (self.mask,)

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        positions = torch.as_tensor(_made(self.order).positions, device=q.device)
        return self.mask.allows(b, h, positions[q], kv)

    def bounds(self, groups: Groups, keys: Universe) -> Bounds:
        made = _made(self.order)
        grid = self._grid()
        if grid is None:
            first = _reduced(np.minimum, made.positions, groups.first, groups.last)
            last = _reduced(np.maximum, made.positions, groups.first, groups.last)
            return self.mask.bounds(Groups(groups.batch, first, last), keys)
        before = self.order.grounds.before
        own = Universe(*(np.maximum(edge - before, 0) for edge in keys))
        inner = grid.bounds_of(_hulls(_made(self.order), groups.first, groups.last), own)
        offset = np.full_like(groups.first, before)
        needed = inner.needed.shifted(offset, keys)
        if inner.is_exact:
            return Bounds.exactly(needed)
        # A few sure keys amid unsure ones save nothing: the residual mask is added to all, in more pieces.
        is_worth = 2 * inner.sure.sizes() >= inner.needed.sizes()
        return Bounds(needed, inner.sure.shifted(offset, keys).where(is_worth, Spans.nothing(keys)))

    def residual(self, box: Box) -> bool | Hashable:
        grid = self._grid()
        if grid is None:
            positions = _made(self.order).positions[box.rows[0] : box.rows[-1] + 1]
            hull = range(int(positions.min()), int(positions.max()) + 1)
            residual = self.mask.residual(Box(box.batch, hull, box.keys))
            return residual if isinstance(residual, bool) else super().residual(box)
        before = self.order.grounds.before
        if box.keys[0] < before:
            return super().residual(box) if box.keys[-1] >= before else False
        keys = range(box.keys.start - before, box.keys.stop - before, box.keys.step)
        return grid.residual_of(_cells(self.order, box.rows), keys)

    def cuts(self, batch: int, rows: range) -> Ints:
        return _made(self.order).edges

    def __repr__(self) -> str:
        return str(self.mask)

    def _grid(self) -> Grid | None:
        """The mask, if it is a rule on the grid of the order."""
        grid, grounds = _grid_of(self.mask)
        return grid if grounds == self.order.grounds else None


def _hulls(made: _Made, first: Ints, last: Ints) -> Hulls:
    top, left = (_reduced(np.minimum, edge, first, last) for edge in (made.top, made.left))
    bottom, right = (_reduced(np.maximum, edge, first, last) for edge in (made.bottom, made.right))
    some = bottom >= 0
    every = _reduced(np.minimum, made.bottom, first, last) >= 0
    top, bottom, left, right = (np.where(some, edge, 0) for edge in (top, bottom, left, right))
    return Hulls(top, bottom, left, right, some, every)


@lru_cache(maxsize=256)
def _cells(order: RowOrder, rows: range) -> Cells:
    """Kept, since the ranges of keys of one tile are asked for one by one."""
    made = _made(order)
    hull = _hulls(made, np.asarray([rows[0]]), np.asarray([rows[-1]]))
    square = int(np.searchsorted(made.edges, rows[0], side="right")) - 1
    start = int(made.edges[square])
    stop = int(made.edges[square + 1]) if square + 1 < len(made.edges) else order.q_len
    place = (order, rows)
    pattern = (made.shapes[square], rows.start - start, rows.step, len(rows)) if rows[-1] < stop else place
    first = (int(made.top[rows[0]]), int(made.left[rows[0]]))
    return Cells(hull.first_ends, bool(hull.all[0]), first, pattern, place)


def in_order(mask: Mask, order: RowOrder) -> Mask:
    """The mask on rows in that order; what is joined is put in order part by part, and so keeps what the parts know."""
    return mask.with_atoms(lambda atom: InOrder(atom, order))


def wanted_order(mask: Mask, q_first: int, q_len: int) -> RowOrder | None:
    """The order in which a mask would like its rows taken: that of the first rule on a grid in it; None if it has none.

    ``q_first`` is the position of the first of ``q_len`` rows.
    """
    for atom in mask.atoms():
        grid, grounds = _grid_of(atom)
        if grid is not None and grounds is not None and grid.squares is not None:
            return RowOrder(grounds, grid.squares, q_first, q_len)
    return None


def _grid_of(mask: Mask) -> tuple[Grid, Grounds] | tuple[None, None]:
    rule, before = (mask.rule, mask.length) if isinstance(mask, After) else (mask, 0)
    return (rule, Grounds(rule.height, rule.width, before)) if isinstance(rule, Grid) else (None, None)


def _reduced(function: np.ufunc, values: Ints, first: Ints, last: Ints) -> Ints:
    """Minimum or maximum from ``first`` to ``last``, both included, per group."""
    edges = np.stack([first, last + 1], axis=-1).ravel()
    padded = np.append(values, values[-1:])  # an end may lie behind the last row
    found: Ints = function.reduceat(padded, edges)[::2]
    return found
