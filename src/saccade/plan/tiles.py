"""Tile, a box of an attention matrix that a kernel computes, and Rule, the interface through which plans use masks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from saccade.plan.key_ranges import Bounds, Ints, KeyDomain
from saccade.plan.row_groups import Groups

ALL = -1
"""Index that stands for all batch items or all heads."""

Ranges = tuple[range, ...]


class Box(NamedTuple):
    """Ranges of row and key positions, with the same step, in one batch item (or in `ALL` items)."""

    batch: int
    rows: range
    keys: range


class Triangle(NamedTuple):
    """A causal residual mask, which kernels support natively: row r may attend to column c iff ``c <= r + offset``."""

    rows: int
    columns: int
    offset: int

    @property
    def is_square(self) -> bool:
        """Whether the triangle is a square with offset 0, for which fused kernels skip half of the pairs."""
        return self.rows == self.columns and self.offset == 0


class Rule(Protocol):
    """The interface through which plans read masks, for example their bounds. All coordinates are positions."""

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of batch items and heads with separate masks; 1 means that all share one mask."""
        ...

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Evaluate the mask for individual pairs. This is called only for pairs that the bounds leave undecided."""
        ...

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        """Return bounds on the keys that are visible to at least one row, and to all rows, of each group."""
        ...

    def partial(self, box: Box) -> bool | Hashable:
        """Return True or False if the mask is constant on a box. If not, return a cache key for the mask's values."""
        ...

    def cuts(self, batch: int, rows: range) -> Ints:
        """Return the positions in ``rows`` at which a new group of rows should start."""
        ...

    def terms(self) -> Sequence[tuple[int, Rule]]:
        """Return disjoint masks whose union is this mask, each with the step of its rows and keys."""
        ...


class ColumnRange(NamedTuple):
    """Key columns of a tile. ``partial`` is True if all rows see them; if not, it is the residual mask's cache key."""

    keys: range
    partial: bool | Hashable


class Tile(NamedTuple):
    """A box of a matrix ``[batch, heads, q_len, kv_len]``, in indices, and the mask to evaluate where it is partial."""

    batch: slice
    heads: slice
    rows: range
    columns: tuple[ColumnRange, ...]
    rule: Rule

    @property
    def height(self) -> int:
        """Number of rows in the tile."""
        return len(self.rows)

    @property
    def width(self) -> int:
        """Number of key columns in the tile."""
        return sum([len(strip.keys) for strip in self.columns])

    @property
    def spans(self) -> Ranges:
        """Ranges of key columns in the tile."""
        return tuple([strip.keys for strip in self.columns])
