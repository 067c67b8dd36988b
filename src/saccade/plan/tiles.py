"""Tile: a box of [batch, heads, q_len, kv_len], and what a plan asks of a rule: bounds on groups of rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from saccade.plan.key_ranges import Bounds, Ints, KeyDomain

ALL = -1
"""Stands for "all batch items" (or heads) where an index of one is expected."""

Ranges = tuple[range, ...]


class Groups(NamedTuple):
    """Groups of rows, as arrays of shape ``[groups]``: whose they are, and the positions they span (inclusive).

    With a ``step`` above 1 the rows of a group are every step-th position from its first on, and the keys in
    question are those at the same distance: ``(query - key) % step == 0``.
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
        """Return some of the groups."""
        return Groups(self.batch[which], self.first[which], self.last[which], self.step)


class Box(NamedTuple):
    """Rows × keys of one batch item (or of `ALL`), in positions; both ranges have the same step."""

    batch: int
    rows: range
    keys: range


class Triangle(NamedTuple):
    """The one residual that kernels know by shape: key column c is allowed for row r iff ``c <= r + offset``."""

    rows: int
    columns: int
    offset: int

    @property
    def is_square(self) -> bool:
        """True for the plain causal square, which fused kernels skip half of."""
        return self.rows == self.columns and self.offset == 0


class Rule(Protocol):
    """Methods of a mask that a plan calls; positions throughout."""

    @property
    def shape(self) -> tuple[int, int]:
        """(batch items, heads) that the rule tells apart; 1 means all alike."""
        ...

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Evaluate the definition, for the pairs that bounds leave open."""
        ...

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        """Keys needed by some row of each group, and keys that every row has."""
        ...

    def partial(self, box: Box) -> bool | Hashable:
        """Return True or False if the rule is constant on the box; else a key: equal keys mean equal contents."""
        ...

    def cuts(self, batch: int, rows: range) -> Ints:
        """Positions among ``rows`` before which a group of them would like to end."""
        ...

    def terms(self) -> Sequence[tuple[int, Rule]]:
        """Disjoint rules that make up this one, each with the step of its rows and keys; usually ``[(1, self)]``."""
        ...


class ColumnRange(NamedTuple):
    """Key columns of a tile, and where the rule must still be asked: True (nowhere) or a residual key."""

    keys: range
    partial: bool | Hashable


class Tile(NamedTuple):
    """A box of [batch, heads, q_len, kv_len], in indices, and the rule to ask where a strip is unsure."""

    batch: slice
    heads: slice
    rows: range
    columns: tuple[ColumnRange, ...]
    rule: Rule

    @property
    def height(self) -> int:
        """Number of rows."""
        return len(self.rows)

    @property
    def width(self) -> int:
        """Number of key columns."""
        return sum([len(strip.keys) for strip in self.columns])

    @property
    def spans(self) -> Ranges:
        """The key columns."""
        return tuple([strip.keys for strip in self.columns])
