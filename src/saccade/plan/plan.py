"""Plan: tiles that cover every pair that a mask allows, with the rows grouped in the cheapest way.

A plan is computed from the bounds of a mask on *groups of rows*, never from individual pairs. Several groupings are
compared (all rows together, blocks of 768 or 192, cuts at positions that the mask prefers, batch items together or
separate). The cost of each is estimated in query-key pairs, and the cheapest is selected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np

from saccade.plan import layout
from saccade.plan.key_ranges import KeyDomain
from saccade.plan.layout import Layout, Sizes
from saccade.plan.row_groups import Groups, block_heights, row_groups, ways_to_cut
from saccade.plan.tiles import ALL, Rule, Tile

_MOST_CACHED_TILES = 4096  # a plan with more tiles does not cache them but recomputes them in each iteration


class Plan:
    """The plan for one mask and one matrix shape, with tiles that are computed on first use.

    Args:
        shape: (batch, heads, q_len, kv_len), the box that the plan covers.
        terms: disjoint masks whose union is the mask, each with the step of its row and key ranges; may be empty.
        q_first, kv_first: positions of the first query and the first key.

    Attributes:
        overlaps: whether a row may be in several tiles with disjoint keys, whose results are then merged using their
            lse. If not, every row is in exactly one tile, which may have no columns.
        memo: cache for data that kernels derive from this plan, such as residual masks; it lives as long as the plan.

    Cost: none until tiles are read. A kernel that reads the bounds of the mask directly does not need tiles.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        terms: Sequence[tuple[int, Rule]] = (),
        q_first: int = 0,
        kv_first: int = 0,
    ):
        self.shape = shape
        self.overlaps = len(terms) > 1
        self.memo: dict[Hashable, object] = {}
        self._terms, self._sizes = terms, Sizes(shape, q_first, kv_first)

    @cached_property
    def tiles(self) -> Iterable[Tile]:
        """Tiles of the plan, in the order of their rows."""
        return _Tiles(self._layouts, self.count)

    @cached_property
    def count(self) -> int:
        """Number of tiles in the plan."""
        return sum([len(layout.groups.first) for layout in self._layouts])

    @cached_property
    def pairs(self) -> int:
        """Number of query-key pairs in all tiles, over batch and heads. The tiles include every visible pair."""
        return int(sum((layout.copies * layout.groups.rows * layout.widths).sum() for layout in self._layouts))

    @cached_property
    def is_full(self) -> bool:
        """Whether every key is known to be visible to every query."""
        if 0 in self.shape or len(self._terms) != 1:
            return 0 in self.shape
        (_, first, start), (q_len, kv_len) = self._sizes, self.shape[2:]
        everyone = Groups(np.asarray([ALL]), np.asarray([first]), np.asarray([first + q_len - 1]))
        keys = KeyDomain(np.asarray([start]), np.asarray([start + kv_len]))
        return int(self._terms[0][1].bounds(everyone, keys).all_rows.sizes()[0]) == kv_len

    @cached_property
    def _layouts(self) -> tuple[Layout, ...]:
        return tuple([_cheapest(rule, step, self._sizes) for step, rule in self._terms])

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"Plan({list(self.shape)}, tiles={len(self)}, pairs={self.pairs} of {math.prod(self.shape)})"


class _Tiles:
    """The tiles of a plan. If there are too many to store, each iteration recomputes them."""

    def __init__(self, layouts: tuple[Layout, ...], count: int):
        self._layouts, self._count = layouts, count
        self._cached: tuple[Tile, ...] | None = None

    def __iter__(self) -> Iterator[Tile]:
        if self._cached is None and self._count <= _MOST_CACHED_TILES:
            self._cached = tuple(tile for layout in self._layouts for tile in layout.tiles())
        if self._cached is not None:
            return iter(self._cached)
        return (tile for layout in self._layouts for tile in layout.tiles())


def make(
    rule: Rule, shape: tuple[int, int, int, int], *, q_first: int, kv_first: int, whole_rows: bool = False
) -> Plan:
    """Return the cheapest plan for a mask.

    Args:
        rule: the mask, evaluated at positions.
        shape: (batch, heads, q_len, kv_len).
        q_first, kv_first: positions of the first query and the first key. Further positions are consecutive.
        whole_rows: whether every row must be in a single tile, even if the mask combines masks with different steps.

    Cost: O(rows / 192) for structured masks; never proportional to q_len * kv_len.
    """
    if 0 in shape:
        return Plan(shape)
    terms = [(1, rule)] if whole_rows else rule.terms()
    # The largest distance between a query and a key: a longer step allows exactly the same pairs.
    span = max(q_first + shape[2], kv_first + shape[3]) - min(q_first, kv_first)
    return Plan(shape, [(min(step, span), term) for step, term in terms], q_first, kv_first)


def _cheapest(rule: Rule, step: int, sizes: Sizes) -> Layout:
    """Return the cheapest feasible grouping of a plan's rows. Costs of large groupings are estimated on a sample."""
    candidates: list[tuple[float, int, Callable[[], Layout]]] = []
    batch, least = sizes.shape[0], 0.0
    for items in [[ALL]] if rule.shape[0] == 1 or batch == 1 else [[ALL], list(range(batch))]:
        # Separate items cost at least one tile each, plus the keys visible to all rows. Skip them if that is more.
        if min((cost for cost, _, _ in candidates), default=math.inf) <= layout.TILE_COST * len(items) + least:
            break
        for cuts, could_cut in ways_to_cut(rule, step, items, sizes):
            for block in block_heights(step, sizes, cuts):
                cost, all_rows, make_layout = layout.estimate(rule, sizes, row_groups(items, cuts, block, step, sizes))
                candidates.append((cost, len(candidates), make_layout))
                least = max(least, all_rows)
                # Shorter blocks run more slowly. They help only masks whose partial ranges are large even after the
                # mask's own cuts.
                if block <= 192 and (cost < math.inf or could_cut):
                    break
    for _, _, make_layout in sorted(candidates, key=lambda entry: entry[:2]):
        cheapest = make_layout()
        if cheapest.is_feasible():
            return cheapest
    raise AssertionError("groups of one row are always feasible")
