"""Tile: a box of [batch, heads, q_len, kv_len]; Plan: the boxes to compute. Knows bounds, not masks.

A plan is made from what a rule says about *groups of rows*, never by looking at pairs. Rows are grouped in a few
ways (all at once, blocks of 768 or 192, cut where the rule wants cuts, batch items together or apart), each way is
priced in pairs of query and key, and the cheapest is kept.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from saccade.spans import Bounds, Ints, Spans, Universe

__all__ = ["ALL", "Box", "Groups", "Plan", "Ranges", "Rule", "Strip", "Tile", "Triangle", "make"]

ALL = -1
"""Stands for "all batch items" (or heads) where an index of one is expected."""

Ranges = tuple[range, ...]

# Prices, in pairs of one query and one key. Starting a tile costs about 30 µs, in which 30,000 pairs of width 64
# are computed; the fused operation works through short calls more slowly (its inner block is 32, 64 or 256 rows
# for calls of at least 1, 192 or 768 rows).
_TILE_PRICE = 30_000
_KEY_PRICE = 8.0  # to read a key, which only a few rows do not outweigh
_FEW_ROWS = 16
_ROW_BLOCKS = (768, 192, 48, 12, 1)
_MAX_RESIDUAL = 1 << 22  # entries of one tile's residual mask: 16 MB in float32
_WRITTEN_OUT = 64  # groups up to which a layout is priced tile by tile
_SAMPLE = 1024  # groups on which a larger layout is priced
_KEPT_TILES = 4096  # tiles that a plan keeps; more are made anew each time


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
        """Some of the groups."""
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
    """What a plan asks of a mask; positions throughout."""

    @property
    def shape(self) -> tuple[int, int]:
        """(batch items, heads) that the rule tells apart; 1 means all alike."""
        ...

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """The definition, for the pairs where bounds do not say enough."""
        ...

    def bounds(self, groups: Groups, keys: Universe) -> Bounds:
        """Keys needed by some row of each group, and keys that every row has."""
        ...

    def residual(self, box: Box) -> bool | Hashable:
        """True or False if the rule is constant on the box; else a key: equal keys mean equal contents."""
        ...

    def cuts(self, batch: int, rows: range) -> Ints:
        """Positions among ``rows`` before which a group of them would like to end."""
        ...

    def terms(self) -> Sequence[tuple[int, Rule]]:
        """Disjoint rules that make up this one, each with the step of its rows and keys; usually ``[(1, self)]``."""
        ...


class Strip(NamedTuple):
    """Key columns of a tile, and where the rule must still be asked: True (nowhere) or a residual key."""

    keys: range
    residual: bool | Hashable


class Tile(NamedTuple):
    """A box of [batch, heads, q_len, kv_len], in indices, and the rule to ask where a strip is unsure."""

    batch: slice
    heads: slice
    rows: range
    columns: tuple[Strip, ...]
    rule: Rule

    @property
    def height(self) -> int:
        """Number of rows."""
        return len(self.rows)

    @property
    def width(self) -> int:
        """Number of key columns."""
        return sum(len(strip.keys) for strip in self.columns)


class Plan:
    """The tiles to compute for one rule at one size, made as they are asked for.

    Attributes:
        shape: (batch, heads, q_len, kv_len), the box that the plan covers.
        overlaps: True if a row may stand in several tiles, whose results are then merged by their lse; the keys of
            such tiles are disjoint. Otherwise every row stands in exactly one tile, which may have no columns.
        memo: what kernels derive from this plan and may keep as long as it lives (residual tensors, by key).
    """

    def __init__(self, shape: tuple[int, int, int, int], layouts: Sequence[_Layout]):
        self.shape = shape
        self.overlaps = len(layouts) > 1
        self.memo: dict[Hashable, object] = {}
        self._layouts = tuple(layouts)

    @property
    def tiles(self) -> Iterable[Tile]:
        """The tiles, in the order of their rows."""
        return self._kept if len(self) <= _KEPT_TILES else self._made()

    @cached_property
    def pairs(self) -> int:
        """How many query-key pairs the tiles hold, over batch and heads: at least the visible ones."""
        return int(sum((layout.copies * layout.groups.rows * layout.widths).sum() for layout in self._layouts))

    @cached_property
    def is_full(self) -> bool:
        """True if every query may attend to every key."""
        sure = all((layout.unsure.sizes() == 0).all() for layout in self._layouts)
        return sure and self.pairs == math.prod(self.shape)

    def __len__(self) -> int:
        return sum(len(layout.groups.first) for layout in self._layouts)

    def __repr__(self) -> str:
        return f"Plan({list(self.shape)}, tiles={len(self)}, pairs={self.pairs} of {math.prod(self.shape)})"

    @cached_property
    def _kept(self) -> tuple[Tile, ...]:
        return tuple(self._made())

    def _made(self) -> Iterator[Tile]:
        for layout in self._layouts:
            yield from layout.tiles()


def make(
    rule: Rule, shape: tuple[int, int, int, int], *, q_first: int, kv_first: int, whole_rows: bool = False
) -> Plan:
    """The cheapest plan for a rule.

    Args:
        rule: what may attend to what, on positions.
        shape: (batch, heads, q_len, kv_len).
        q_first, kv_first: positions of the first query and the first key; the others follow one by one.
        whole_rows: every row must stand in one tile, even where a rule falls into terms with different steps.

    Cost: O(rows / 192) for structured masks, and nothing that grows with q_len * kv_len.
    """
    if 0 in shape:
        return Plan(shape, ())
    sizes = _Sizes(shape, q_first, kv_first)
    terms = [(1, rule)] if whole_rows else rule.terms()
    # No query and no key are further apart than this: a longer step joins no more of them, and no fewer.
    span = max(q_first + shape[2], kv_first + shape[3]) - min(q_first, kv_first)
    return Plan(shape, [_cheapest(term, min(step, span), sizes) for step, term in terms])


class _Sizes(NamedTuple):
    shape: tuple[int, int, int, int]
    q_first: int
    kv_first: int


@dataclasses.dataclass(frozen=True, eq=False)
class _Layout:
    """One way to group the rows, with what the rule says about each group."""

    rule: Rule
    sizes: _Sizes
    groups: Groups
    sure: Spans
    unsure: Spans

    @classmethod
    def of(cls, rule: Rule, sizes: _Sizes, groups: Groups) -> _Layout:
        """Ask the rule for its bounds."""
        kv_first, kv_len = sizes.kv_first, sizes.shape[3]
        keys = Universe(np.full_like(groups.first, kv_first), np.full_like(groups.first, kv_first + kv_len))
        bounds = rule.bounds(groups, keys)
        unsure = Spans.nothing(keys) if bounds.is_exact else bounds.needed.minus(bounds.sure, keys)
        return cls(rule, sizes, groups, bounds.sure, unsure)

    @property
    def copies(self) -> Ints:
        """Batch items × heads that each group stands for."""
        return np.where(self.groups.batch == ALL, self.sizes.shape[0], 1) * self.sizes.shape[1]

    @property
    def told_apart(self) -> Ints:
        """How many different residual masks a group has over batch items and heads, at most."""
        (batch, heads, _, _), (items, own_heads) = self.sizes.shape, self.rule.shape
        return np.where(self.groups.batch == ALL, min(items, batch), 1) * min(own_heads, heads)

    @property
    def widths(self) -> Ints:
        """Columns of each group."""
        return self._count(self.sure) + self._count(self.unsure)

    @property
    def residuals(self) -> Ints:
        """Entries of each group's residual masks."""
        return self.groups.rows * self._count(self.unsure) * self.told_apart

    def is_feasible(self) -> bool:
        """True if no residual mask is too large, or no group can be made smaller."""
        rows = self.groups.rows
        return bool(((self.residuals <= _MAX_RESIDUAL) | (rows == 1)).all()) or self._all_native()

    def price(self) -> float:
        """What running the tiles costs, in pairs."""
        count = len(self.groups.first)
        if count <= _WRITTEN_OUT:
            told_apart = int(self.told_apart.max())
            return sum(self._price_of(tile, told_apart) for tile in self._written_out)
        # Bounds do not know which residuals are native; a few groups, written out, say by how much that is less.
        some = np.unique(np.linspace(0, count - 1, _WRITTEN_OUT).astype(np.int64))
        few = _Layout(self.rule, self.sizes, self.groups.at(some), self.sure.at(some), self.unsure.at(some))
        return self._price_by_bounds() * few.price() / (few._price_by_bounds() or 1.0)

    def price_of_sure(self) -> float:
        """What the keys cost that every row has: no grouping of the rows does without them."""
        pairs = self.copies * self.groups.rows * self._count(self.sure)
        return float(pairs.sum()) * _price_of_pair(self.sizes.shape[2])

    def _price_by_bounds(self) -> float:
        rows = self.groups.rows
        heights, which = np.unique(rows, return_inverse=True)
        prices = np.asarray([_price_of_pair(height) for height in heights.tolist()])
        pairs = self.copies * rows * self.widths * prices[which]
        return float(pairs.sum() + self.residuals.sum() + _TILE_PRICE * len(rows))

    def tiles(self) -> Iterable[Tile]:
        """The tiles, in the order of their groups."""
        return self._written_out if len(self.groups.first) <= _WRITTEN_OUT else self._made()

    @cached_property
    def _written_out(self) -> tuple[Tile, ...]:
        """Kept, since they are priced before they are run."""
        return tuple(self._made())

    def _made(self) -> Iterator[Tile]:
        """Ask for the residual of each strip, and translate positions to indices."""
        (batch, heads, _, _), q_first, kv_first = self.sizes
        step = self.groups.step
        numbers = (self.groups.batch.tolist(), self.groups.first.tolist(), self.groups.last.tolist())
        for i, (item, first, last) in enumerate(zip(*numbers, strict=True)):
            rows = range(first, last + 1, step)
            strips = [Strip(keys, True) for keys in self._keys(self.sure, i)]
            for keys in self._keys(self.unsure, i):
                residual = self.rule.residual(Box(item, rows, keys))
                if residual is not False:
                    strips.append(Strip(keys, residual))
            strips.sort(key=lambda strip: strip.keys.start)
            yield Tile(
                slice(0, batch) if item == ALL else slice(item, item + 1),
                slice(0, heads),
                range(first - q_first, last + 1 - q_first, step),
                tuple(Strip(_moved(strip.keys, -kv_first), strip.residual) for strip in strips),
                self.rule,
            )

    def _keys(self, spans: Spans, group: int) -> Iterator[range]:
        step, first = self.groups.step, int(self.groups.first[group])
        for span in spans.ranges(group):
            keys = span if step == 1 else range(span.start + (first - span.start) % step, span.stop, step)
            if len(keys):
                yield keys

    def _count(self, spans: Spans) -> Ints:
        if self.groups.step == 1:
            return spans.sizes()
        first, step = self.groups.first[:, None], self.groups.step
        starts = spans.starts + (first - spans.starts) % step
        return np.maximum(0, -((starts - spans.ends) // step)).sum(axis=1)

    def _all_native(self) -> bool:
        few = len(self.groups.first) <= _WRITTEN_OUT
        return few and all(_is_native(strip) for tile in self.tiles() for strip in tile.columns)

    def _price_of(self, tile: Tile, told_apart: int) -> float:
        wanted = 0.0
        for strip in tile.columns:
            half = _is_native(strip) and strip.residual is not True
            wanted += len(strip.keys) * (0.5 if half else 1.0)
        unsure = sum(len(strip.keys) for strip in tile.columns if not _is_native(strip))
        copies = (tile.batch.stop - tile.batch.start) * self.sizes.shape[1]
        pairs = tile.height * (copies * wanted * _price_of_pair(tile.height) + unsure * told_apart)
        if tile.height > _FEW_ROWS:
            return _TILE_PRICE + pairs
        # Keys that do not follow one another are run a range at a time, or gathered, which many rows outweigh.
        gaps = sum(left.keys.stop < right.keys.start for left, right in itertools.pairwise(tile.columns))
        return _TILE_PRICE * (1 + gaps) + pairs


def _cheapest(rule: Rule, step: int, sizes: _Sizes) -> _Layout:
    """Price the ways to group the rows, large ones on a sample, and keep the cheapest that is feasible."""
    priced: list[tuple[float, int, Callable[[], _Layout]]] = []
    batch, least = sizes.shape[0], 0.0
    for items in [[ALL]] if rule.shape[0] == 1 or batch == 1 else [[ALL], list(range(batch))]:
        # Apart, each item has a tile at least, and the keys that are sure for all: more than that need not be asked.
        if min((price for price, _, _ in priced), default=math.inf) <= _TILE_PRICE * len(items) + least:
            break
        for cuts, could_cut in _ways(rule, step, items, sizes):
            for block in _blocks(step, sizes, cuts):
                price, sure, made = _sampled(rule, sizes, _grouped(items, cuts, block, step, sizes))
                priced.append((price, len(priced), made))
                least = max(least, sure)
                # Shorter blocks are slower to run; they are for rules that leave too much unsure even where the rows
                # are cut as the rule wishes.
                if block <= 192 and (price < math.inf or could_cut):
                    break
    for _, _, made in sorted(priced, key=lambda entry: entry[:2]):
        layout = made()
        if layout.is_feasible():
            return layout
    raise AssertionError("groups of one row are always feasible")


def _ways(rule: Rule, step: int, items: list[int], sizes: _Sizes) -> Iterator[tuple[list[Ints], bool]]:
    """Rows cut as the rule wishes or not: (cuts of each item, could be cut)."""
    first, stop = sizes.q_first, sizes.q_first + sizes.shape[2]
    none = np.zeros(0, dtype=np.int64)
    can_cut = step == 1 and stop - first > 1
    wanted = [np.unique(rule.cuts(item, range(first, stop))) if can_cut else none for item in items]
    wanted = [own[(own > first) & (own < stop)] for own in wanted]
    can_cut = any(len(own) for own in wanted)
    if can_cut:
        yield wanted, False
    yield [own[:0] for own in wanted], can_cut


def _blocks(step: int, sizes: _Sizes, cuts: list[Ints]) -> list[int]:
    """Heights to try, largest first; of those that no run of rows between two cuts reaches, the smallest only."""
    first, stop = sizes.q_first, sizes.q_first + sizes.shape[2]
    if stop - first == 1:
        return [1]
    edges = [np.concatenate([[first], own, [stop]]) for own in cuts]
    longest = max(int(np.diff(own).max()) for own in edges)
    longest = -(-longest // step)
    return [longest, *(block for block in _ROW_BLOCKS if block < longest)]


def _grouped(items: list[int], cuts: list[Ints], block: int, step: int, sizes: _Sizes) -> Groups:
    first, stop = sizes.q_first, sizes.q_first + sizes.shape[2]
    if stop - first == 1:
        row = np.full(len(items), first, dtype=np.int64)
        return Groups(np.asarray(items, dtype=np.int64), row, row, step)
    starts, ends = zip(*(_cut_up(first, stop, own, block, step) for own in cuts), strict=True)
    batch = np.repeat(np.asarray(items, dtype=np.int64), [len(own) for own in starts])
    return Groups(batch, np.concatenate(starts), np.concatenate(ends), step)


def _cut_up(first: int, stop: int, cuts: Ints, block: int, step: int) -> tuple[Ints, Ints]:
    """First and last rows of groups of at most ``block`` rows, which begin anew after each cut and in each class."""
    if step == 1:
        begins = np.concatenate([[first], cuts]).astype(np.int64)
        ends = np.concatenate([cuts, [stop]]).astype(np.int64)
    else:
        begins = np.arange(first, min(first + step, stop), dtype=np.int64)
        ends = np.full_like(begins, stop)
    rows = -((begins - ends) // step)
    groups = -(-rows // block)
    within = np.arange(groups.sum()) - np.repeat(np.cumsum(groups) - groups, groups)
    starts = np.repeat(begins, groups) + within * block * step
    last = np.minimum(starts + (block - 1) * step, np.repeat(begins + (rows - 1) * step, groups))
    return starts, last


def _sampled(rule: Rule, sizes: _Sizes, groups: Groups) -> tuple[float, float, Callable[[], _Layout]]:
    """A grouping's price, inf if it is not feasible, that of its sure keys, and the layout; of many groups by some."""
    count = len(groups.first)
    some = groups.at(np.unique(np.linspace(0, count - 1, _SAMPLE).astype(np.int64))) if count > _SAMPLE else groups
    layout = _Layout.of(rule, sizes, some)
    share = count / len(some.first)
    price = layout.price() * share if layout.is_feasible() else math.inf
    made = (lambda: layout) if some is groups else partial(_Layout.of, rule, sizes, groups)
    return price, layout.price_of_sure() * share, made


def _price_of_pair(rows: int) -> float:
    if rows >= 192:
        return 1.0 if rows >= 768 else 290 / 235
    return 290 / 190 + _KEY_PRICE / rows


def _is_native(strip: Strip) -> bool:
    """Whether kernels need no residual mask for the strip."""
    return strip.residual is True or (isinstance(strip.residual, Triangle) and strip.residual.is_square)


def _moved(span: range, by: int) -> range:
    return range(span.start + by, span.stop + by, span.step)
