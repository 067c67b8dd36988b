"""Layout: a grouping of a plan's rows, and its cost."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from saccade.plan.key_ranges import Ints, KeyDomain, Spans, shift_range
from saccade.plan.row_groups import Groups
from saccade.plan.tiles import ALL, Box, ColumnRange, Rule, Tile, Triangle

# Costs in query-key pairs. Starting a tile costs about 30 µs, as much as computing 30,000 pairs of width 64. The
# fused operation processes short calls more slowly (its inner block is 32, 64 or 256 rows for calls of at least
# 1, 192 or 768 rows).
TILE_COST = 30_000
_KEY_PRICE = 8.0  # cost of reading a key, which matters only for few rows
_FEW_ROWS = 16
_MAX_RESIDUAL = 1 << 22  # entries of one tile's residual mask: 16 MB in float32
_FEW_GROUPS = 64  # largest number of groups for which the cost of a layout is summed tile by tile
_FEW_RANGES = 512  # with more groups, number of key ranges in the sample on which their cost is estimated
_SAMPLE = 512  # number of groups on which the cost of a larger layout is estimated


class Sizes(NamedTuple):
    """Shape of an attention matrix, and the positions of its first query and its first key."""

    shape: tuple[int, int, int, int]
    q_first: int
    kv_first: int


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """A grouping of a plan's rows, with the bounds of the mask on each group.

    Bounds leave the visibility of some pairs undecided. A *residual mask* is the dense mask of such pairs in a tile.

    Attributes:
        rule: the mask.
        sizes: shape and first positions of the matrix.
        groups: the groups of rows, in order.
        all_rows: for each group, the keys that all of its rows see.
        undecided: for each group, the other keys that some of its rows may see.
    """

    rule: Rule
    sizes: Sizes
    groups: Groups
    all_rows: Spans
    undecided: Spans

    @classmethod
    def of(cls, rule: Rule, sizes: Sizes, groups: Groups) -> Layout:
        """Return the layout for the given groups of rows, computed from the bounds of the mask on each group."""
        kv_first, kv_len = sizes.kv_first, sizes.shape[3]
        keys = KeyDomain(np.full_like(groups.first, kv_first), np.full_like(groups.first, kv_first + kv_len))
        bounds = rule.bounds(groups, keys)
        undecided = Spans.nothing(keys) if bounds.is_exact else bounds.any_row.minus(bounds.all_rows, keys)
        return cls(rule, sizes, groups, bounds.all_rows, undecided)

    @property
    def copies(self) -> Ints:
        """Number of attention matrices (one per batch item and head) that each group of rows covers."""
        return np.where(self.groups.batch == ALL, self.sizes.shape[0], 1) * self.sizes.shape[1]

    @property
    def num_distinct(self) -> Ints:
        """Upper bound on the number of different residual masks in each group, over batch items and heads."""
        (batch, heads, _, _), (items, own_heads) = self.sizes.shape, self.rule.shape
        return np.where(self.groups.batch == ALL, min(items, batch), 1) * min(own_heads, heads)

    @property
    def widths(self) -> Ints:
        """Number of key columns in each group of rows."""
        return self._count(self.all_rows) + self._count(self.undecided)

    @property
    def residuals(self) -> Ints:
        """Number of entries in the residual masks of each group."""
        return self.groups.rows * self._count(self.undecided) * self.num_distinct

    def is_feasible(self) -> bool:
        """Return whether every group has a single row or a small residual mask, or no tile needs a residual mask."""
        rows = self.groups.rows
        return bool(((self.residuals <= _MAX_RESIDUAL) | (rows == 1)).all()) or self._all_native()

    def cost(self) -> float:
        """Return the estimated cost of computing the layout's tiles, in query-key pairs."""
        count = len(self.groups.first)
        if count <= _FEW_GROUPS:
            return self._cost_by_tiles()
        # Bounds do not show which residual masks are native. Estimate their savings from the tiles of a few groups.
        ranges = self.all_rows.starts.shape[1] + self.undecided.starts.shape[1]
        some = np.unique(np.linspace(0, count - 1, min(_FEW_GROUPS, _FEW_RANGES // ranges + 2)).astype(np.int64))
        few = Layout(self.rule, self.sizes, self.groups.at(some), self.all_rows.at(some), self.undecided.at(some))
        return self._cost_by_bounds() * few._cost_by_tiles() / (few._cost_by_bounds() or 1.0)

    def cost_of_fully_visible(self) -> float:
        """Return the cost of pairs that are visible to all rows of their group. Other groupings also compute them."""
        pairs = self.copies * self.groups.rows * self._count(self.all_rows)
        return float(pairs.sum()) * _cost_of_pair(self.sizes.shape[2])

    def _cost_by_tiles(self) -> float:
        """Return the sum of the estimated costs of all tiles, in query-key pairs."""
        num_distinct = int(self.num_distinct.max())
        return sum(self._cost_of(tile, num_distinct) for tile in self._cached_tiles)

    def _cost_by_bounds(self) -> float:
        """Return the cost estimated from bounds alone, as if all undecided pairs needed residual masks."""
        rows = self.groups.rows
        pairs = self.copies * rows * self.widths * _cost_of_pair(rows)
        return float(pairs.sum() + self.residuals.sum() + TILE_COST * len(rows))

    def tiles(self) -> Iterable[Tile]:
        """Yield the tiles of the layout, in the order of its groups."""
        return self._cached_tiles if len(self.groups.first) <= _FEW_GROUPS else self._build_tiles()

    @cached_property
    def _cached_tiles(self) -> tuple[Tile, ...]:
        """Tiles of the layout, cached because both the cost estimate and the kernel read them."""
        return tuple(self._build_tiles())

    def _build_tiles(self) -> Iterator[Tile]:
        """Yield the layout's tiles, with indices instead of positions. Ranges without visible pairs are left out."""
        (batch, heads, _, _), q_first, kv_first = self.sizes
        step = self.groups.step
        numbers = (self.groups.batch.tolist(), self.groups.first.tolist(), self.groups.last.tolist())
        ranges = [spans.ranges(self.groups.first, step) for spans in (self.all_rows, self.undecided)]
        for item, first, last, all_rows, undecided in zip(*numbers, *ranges, strict=True):
            rows = range(first, last + 1, step)
            strips = [ColumnRange(keys, True) for keys in all_rows]
            for keys in undecided:
                partial = self.rule.partial(Box(item, rows, keys))
                if partial is not False:
                    strips.append(ColumnRange(keys, partial))
            strips.sort(key=lambda strip: strip.keys.start)
            yield Tile(
                slice(0, batch) if item == ALL else slice(item, item + 1),
                slice(0, heads),
                range(first - q_first, last + 1 - q_first, step),
                tuple(ColumnRange(shift_range(strip.keys, -kv_first), strip.partial) for strip in strips),
                self.rule,
            )

    def _count(self, spans: Spans) -> Ints:
        """Return the number of key columns in the spans of each group, which depends on the step of the groups."""
        if self.groups.step == 1:
            return spans.sizes()
        first, step = self.groups.first[:, None], self.groups.step
        starts = spans.starts + (first - spans.starts) % step
        return np.maximum(0, -((starts - spans.ends) // step)).sum(axis=1)

    def _all_native(self) -> bool:
        """Return whether there are few groups and no tile needs a residual mask."""
        few = len(self.groups.first) <= _FEW_GROUPS
        return few and all(_is_native(strip) for tile in self.tiles() for strip in tile.columns)

    def _cost_of(self, tile: Tile, num_distinct: int) -> float:
        """Return the estimated cost of a tile with ``num_distinct`` residual masks, in query-key pairs."""
        wanted = 0.0
        for strip in tile.columns:
            half = _is_native(strip) and strip.partial is not True
            wanted += len(strip.keys) * (0.5 if half else 1.0)
        undecided = sum(len(strip.keys) for strip in tile.columns if not _is_native(strip))
        copies = (tile.batch.stop - tile.batch.start) * self.sizes.shape[1]
        pairs = tile.height * (copies * wanted * _cost_of_pair(tile.height) + undecided * num_distinct)
        if tile.height > _FEW_ROWS:
            return TILE_COST + pairs
        # Keys in several ranges run one range at a time or are gathered, which matters only for few rows.
        gaps = sum(left.keys.stop < right.keys.start for left, right in itertools.pairwise(tile.columns))
        return TILE_COST * (1 + gaps) + pairs


def estimate(rule: Rule, sizes: Sizes, groups: Groups) -> tuple[float, float, Callable[[], Layout]]:
    """Return the cost of a row grouping (inf if infeasible), and a function that builds its layout.

    The second result is the cost of fully visible keys alone. Costs of large groupings are estimated on a sample.
    """
    count = len(groups.first)
    some = groups.at(np.unique(np.linspace(0, count - 1, _SAMPLE).astype(np.int64))) if count > _SAMPLE else groups
    layout = Layout.of(rule, sizes, some)
    share = count / len(some.first)
    cost = layout.cost() * share if layout.is_feasible() else math.inf
    make_layout = (lambda: layout) if some is groups else partial(Layout.of, rule, sizes, groups)
    return cost, layout.cost_of_fully_visible() * share, make_layout


def _cost_of_pair(rows: Any) -> Any:
    """Return how much a plan charges for one pair, by the height of its tile; 1 in tiles of 768 rows or more.

    The height may be an array.
    """
    is_high, is_middle = rows >= 768, (rows >= 192) & (rows < 768)
    return is_high + is_middle * (290 / 235) + (rows < 192) * (290 / 190 + _KEY_PRICE / rows)


def _is_native(strip: ColumnRange) -> bool:
    """Return whether a column range needs no residual mask, because it is fully visible or a causal square."""
    return strip.partial is True or (isinstance(strip.partial, Triangle) and strip.partial.is_square)
