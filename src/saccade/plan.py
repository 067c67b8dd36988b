"""Tile: a box of [batch, heads, q_len, kv_len]; Plan: the boxes to compute. Knows bounds, not masks.

A plan is made from what a rule says about *groups of rows*, never by looking at pairs. Rows are grouped in a few
ways (all at once, blocks of 768 or 192, cut where the rule wants cuts, batch items together or apart), each way is
priced in pairs of query and key, and the cheapest is kept.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from saccade.spans import Bounds, Ints, Universe

__all__ = ["ALL", "Box", "Groups", "Plan", "Ranges", "Rule", "Strip", "Tile", "Triangle", "make"]

ALL = -1
"""Stands for "all batch items" (or heads) where an index of one is expected."""

Ranges = tuple[range, ...]

# Prices, in pairs of one query and one key. Starting a tile costs about 30 µs, in which 30,000 pairs of width 64
# are computed; the fused operation works through short calls more slowly (its inner block is 32, 64 or 256 rows
# for calls of at least 1, 192 or 768 rows).
_TILE_PRICE = 30_000
_ROW_BLOCKS = (768, 192, 48, 12, 1)
_MAX_RESIDUAL = 1 << 22  # entries of one tile's residual mask: 16 MB in float32
_MAX_PRICED = 4096  # groups beyond which a layout is priced by its bounds alone


class Groups(NamedTuple):
    """Groups of rows, as arrays of shape ``[groups]``: whose they are, and the positions they span (inclusive)."""

    batch: Ints
    """Index of the batch item, or `ALL`: then bounds must hold for all items at once."""
    first: Ints
    last: Ints


class Box(NamedTuple):
    """Rows × keys of one batch item (or of `ALL`), in positions."""

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
    """What a plan asks of a mask; positions throughout."""

    @property
    def shape(self) -> tuple[int, int]:
        """(batch items, heads) that the rule tells apart; 1 means all alike."""
        ...

    def bounds(self, groups: Groups, keys: Universe) -> Bounds:
        """Keys needed by some row of each group, and keys that every row has."""
        ...

    def residual(self, box: Box) -> bool | Hashable:
        """True or False if the rule is constant on the box; else a key: equal keys mean equal contents."""
        ...

    def cuts(self, batch: int) -> Sequence[int]:
        """Positions before which a group of rows would like to end."""
        ...


class Strip(NamedTuple):
    """Consecutive key columns of a tile, and where the rule must still be asked: True (nowhere) or a residual key."""

    keys: range
    residual: bool | Hashable


class Tile(NamedTuple):
    """A box of [batch, heads, q_len, kv_len], in indices."""

    batch: slice
    heads: slice
    rows: Ranges
    columns: tuple[Strip, ...]

    @property
    def height(self) -> int:
        """Number of rows."""
        return sum(len(rows) for rows in self.rows)

    @property
    def width(self) -> int:
        """Number of key columns."""
        return sum(len(strip.keys) for strip in self.columns)


class Plan:
    """The tiles to compute for one rule at one size. Every row that sees a key stands in exactly one tile.

    Attributes:
        shape: (batch, heads, q_len, kv_len), the box that the plan covers.
    """

    def __init__(self, shape: tuple[int, int, int, int], tiles: Sequence[Tile]):
        self.shape = shape
        self.tiles = tuple(tiles)

    @cached_property
    def pairs(self) -> int:
        """How many query-key pairs the tiles hold, over batch and heads: at least the visible ones."""
        return sum(_items(tile) * _heads(tile) * tile.height * tile.width for tile in self.tiles)

    @cached_property
    def is_full(self) -> bool:
        """True if every query may attend to every key."""
        sure = all(strip.residual is True for tile in self.tiles for strip in tile.columns)
        return sure and self.pairs == math.prod(self.shape)

    @cached_property
    def covers_all_rows(self) -> bool:
        """True if every row of every batch item and head stands in some tile."""
        batch, heads, q_len, _ = self.shape
        return sum(_items(tile) * _heads(tile) * tile.height for tile in self.tiles) == batch * heads * q_len

    @cached_property
    def memo(self) -> dict[Hashable, object]:
        """What kernels derive from this plan and may keep as long as it lives (residual tensors, by key)."""
        return {}

    def __len__(self) -> int:
        return len(self.tiles)

    def __repr__(self) -> str:
        return f"Plan({list(self.shape)}, tiles={len(self)}, pairs={self.pairs} of {math.prod(self.shape)})"


def make(rule: Rule, shape: tuple[int, int, int, int], *, q_first: int, kv_first: int) -> Plan:
    """The cheapest plan for a rule.

    Args:
        rule: what may attend to what, on positions.
        shape: (batch, heads, q_len, kv_len).
        q_first, kv_first: positions of the first query and the first key; the others follow one by one.

    Cost: O(rows / 192) for structured masks, and nothing that grows with q_len * kv_len.
    """
    if 0 in shape:
        return Plan(shape, ())
    best: list[Tile] = []
    best_price = math.inf
    for layout in _layouts(rule, shape, q_first, kv_first):
        price, tiles = _price(layout, rule, shape)
        if price < best_price:
            best, best_price = tiles or list(layout.tiles(rule, shape)), price
    return Plan(shape, best)


class _Layout(NamedTuple):
    """One way to group the rows, with what the rule says about each group."""

    groups: Groups
    keys: Universe
    bounds: Bounds
    origin: tuple[int, int]

    def tiles(self, rule: Rule, shape: tuple[int, int, int, int]) -> Iterator[Tile]:
        """Ask for the residual of each strip, and translate positions to indices."""
        q_first, kv_first = self.origin
        sure = self.bounds.needed.intersection(self.bounds.sure, self.keys)
        unsure = self.bounds.needed.minus(sure, self.keys)
        for i, batch in enumerate(self.groups.batch.tolist()):
            rows = range(int(self.groups.first[i]), int(self.groups.last[i]) + 1)
            strips: list[tuple[range, bool | Hashable]] = [(keys, True) for keys in sure.ranges(i)]
            strips += [(keys, rule.residual(Box(batch, rows, keys))) for keys in unsure.ranges(i)]
            columns = tuple(
                Strip(range(keys.start - kv_first, keys.stop - kv_first), residual)
                for keys, residual in sorted(strips, key=lambda strip: strip[0].start)
                if residual is not False
            )
            if columns:
                items = slice(0, shape[0]) if batch == ALL else slice(batch, batch + 1)
                index = range(rows.start - q_first, rows.stop - q_first)
                yield Tile(items, slice(0, shape[1]), (index,), columns)


def _layouts(rule: Rule, shape: tuple[int, int, int, int], q_first: int, kv_first: int) -> Iterator[_Layout]:
    batch, _, q_len, kv_len = shape
    apart = [[ALL]] if rule.shape[0] == 1 or batch == 1 else [[ALL], list(range(batch))]
    for items in apart:
        wanted = [_inner(rule.cuts(item), q_first, q_first + q_len) for item in items]
        for cut in (False, True) if any(wanted) else (False,):
            for block in (q_len, *(block for block in _ROW_BLOCKS if block < q_len)):
                starts = [_starts(q_first, q_len, block, cuts if cut else ()) for cuts in wanted]
                groups = Groups(
                    np.repeat(np.asarray(items, dtype=np.int64), [len(own) for own in starts]),
                    np.concatenate(starts),
                    np.concatenate([np.append(own[1:], q_first + q_len) - 1 for own in starts]),
                )
                keys = Universe(np.full_like(groups.first, kv_first), np.full_like(groups.first, kv_first + kv_len))
                layout = _Layout(groups, keys, rule.bounds(groups, keys), (q_first, kv_first))
                yield layout
                # Blocks below 192 rows are slower to run; they are for rules that leave too much unsure, even
                # where the rows are cut as the rule wishes.
                could_cut = any(wanted) and not cut
                if block <= 192 and (could_cut or _residual_entries(layout, rule, shape) <= _MAX_RESIDUAL):
                    break


def _inner(cuts: Sequence[int], first: int, stop: int) -> tuple[int, ...]:
    return tuple(sorted({cut for cut in cuts if first < cut < stop}))


def _starts(first: int, length: int, block: int, cuts: Sequence[int]) -> Ints:
    """First rows of the groups: blocks that begin anew after each cut."""
    ends = [*cuts, first + length]
    begins = [first, *cuts]
    pieces = [np.arange(begin, end, block, dtype=np.int64) for begin, end in zip(begins, ends, strict=True)]
    return np.concatenate(pieces)


def _residual_entries(layout: _Layout, rule: Rule, shape: tuple[int, int, int, int]) -> int:
    """Entries of the largest residual mask that a group of this layout can have."""
    rows = layout.groups.last - layout.groups.first + 1
    unsure = layout.bounds.needed.minus(layout.bounds.sure, layout.keys).sizes()
    items = np.where(layout.groups.batch == ALL, min(rule.shape[0], shape[0]), 1)
    return int((rows * unsure * items).max(initial=0)) * min(rule.shape[1], shape[1])


def _price(layout: _Layout, rule: Rule, shape: tuple[int, int, int, int]) -> tuple[float, list[Tile]]:
    """Price of a layout in pairs, and its tiles if they had to be made; inf if a residual would be too large."""
    rows = layout.groups.last - layout.groups.first + 1
    copies = np.where(layout.groups.batch == ALL, shape[0], 1) * shape[1]
    if len(rows) > _MAX_PRICED:
        if _residual_entries(layout, rule, shape) > _MAX_RESIDUAL and rows.max() > 1:
            return math.inf, []
        pairs = copies * rows * layout.bounds.needed.sizes()
        return float((pairs * _price_of_pair(rows)).sum() + _TILE_PRICE * len(rows)), []
    tiles = list(layout.tiles(rule, shape))
    price = 0.0
    for tile in tiles:
        wanted = 0.0
        residual = 0
        for strip in tile.columns:
            native = isinstance(strip.residual, Triangle) and strip.residual.is_square
            wanted += len(strip.keys) * (0.5 if native else 1.0)
            residual += 0 if native or strip.residual is True else len(strip.keys)
        told_apart = min(rule.shape[0], _items(tile)) * min(rule.shape[1], shape[1])
        residual *= tile.height * told_apart
        if residual > _MAX_RESIDUAL and tile.height > 1:
            return math.inf, []
        pairs = _items(tile) * shape[1] * tile.height * wanted
        price += _TILE_PRICE + pairs * float(_price_of_pair(np.asarray(tile.height))) + residual
    return price, tiles


def _price_of_pair(rows: Ints) -> npt.NDArray[np.float64]:
    return np.where(rows >= 768, 1.0, np.where(rows >= 192, 290 / 235, 290 / 190))


def _items(tile: Tile) -> int:
    return tile.batch.stop - tile.batch.start


def _heads(tile: Tile) -> int:
    return tile.heads.stop - tile.heads.start
