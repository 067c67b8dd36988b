"""Tile: a box of ``[batch, heads, q_len, kv_len]`` to compute; and the interface of masks that plans use (`Rule`)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from saccade.plan.key_ranges import Bounds, Ints, KeyDomain

ALL = -1
"""Stands for "all batch items" (or heads) where an index of one is expected."""

Ranges = tuple[range, ...]


class Groups(NamedTuple):
    """Groups of rows, as arrays of shape ``[groups]``: their batch items, and the positions they span (inclusive).

    With a ``step`` above 1, a group has every step-th position from its first on, and only keys at multiples of the
    step
    count: ``(query - key) % step == 0``.
    """

    batch: Ints
    """Index of the batch item, or `ALL`: then bounds must hold for all items at once."""
    first: Ints
    last: Ints
    step: int = 1

    @property
    def rows(self) -> Ints:
        """Number of rows in each group."""
        return (self.last - self.first) // self.step + 1

    def at(self, which: Ints) -> Groups:
        """Return some of the groups of rows."""
        return Groups(self.batch[which], self.first[which], self.last[which], self.step)


class Box(NamedTuple):
    """A box of rows × keys of one batch item (or of `ALL`), in positions; both ranges have the same step."""

    batch: int
    rows: range
    keys: range


class Triangle(NamedTuple):
    """The causal residual, which kernels run natively: row r sees key column c of the range iff ``c <= r + offset``."""

    rows: int
    columns: int
    offset: int

    @property
    def is_square(self) -> bool:
        """True for the plain causal square, of which fused kernels skip half."""
        return self.rows == self.columns and self.offset == 0


class Rule(Protocol):
    """The interface of masks that plans use: bounds on groups of rows; in positions throughout."""

    @property
    def shape(self) -> tuple[int, int]:
        """(batch items, heads) that the mask distinguishes; 1 means that all are alike."""
        ...

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Evaluate the mask pair by pair, for the pairs that its bounds leave open."""
        ...

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        """Return bounds on the keys that any row, and that all rows, of each group see."""
        ...

    def partial(self, box: Box) -> bool | Hashable:
        """Return True or False if the mask is constant on a box; else a key that is equal for equal contents."""
        ...

    def cuts(self, batch: int, rows: range) -> Ints:
        """Return the positions among ``rows`` before which a group of rows should end."""
        ...

    def terms(self) -> Sequence[tuple[int, Rule]]:
        """Return disjoint masks whose union is this one, each with the step of its rows and keys."""
        ...


class ColumnRange(NamedTuple):
    """Key columns of a tile; ``partial`` is True if all rows see them, else a key of the residual mask."""

    keys: range
    partial: bool | Hashable


class Tile(NamedTuple):
    """A box of ``[batch, heads, q_len, kv_len]``, in indices, and the mask to evaluate in partial column ranges."""

    batch: slice
    heads: slice
    rows: range
    columns: tuple[ColumnRange, ...]
    rule: Rule

    @property
    def height(self) -> int:
        """Number of rows of the tile."""
        return len(self.rows)

    @property
    def width(self) -> int:
        """Number of key columns of the tile."""
        return sum([len(strip.keys) for strip in self.columns])

    @property
    def spans(self) -> Ranges:
        """The key columns of the tile, as ranges."""
        return tuple([strip.keys for strip in self.columns])
