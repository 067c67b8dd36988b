"""Plan: tiles that cover every pair that a mask allows, with the rows grouped in the cheapest way.

A plan is computed from the bounds of a mask on *groups of rows*, never from individual pairs. Several groupings are
compared (all rows together, blocks of 768 or 192, cuts at positions that the mask prefers, batch items together or
separate). The cost of each is estimated in query-key pairs, and the cheapest is selected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cached_property, partial

import numpy as np

from saccade.plan import row_grouping
from saccade.plan.key_ranges import Ints
from saccade.plan.row_grouping import Layout, Sizes
from saccade.plan.tiles import ALL, Groups, Rule, Tile

_ROW_BLOCKS = (768, 192, 48, 12, 1)
_SAMPLE = 1024  # number of groups on which the cost of a larger layout is estimated
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
        first, q_len, kv_len = self._sizes.q_first, *self.shape[2:]
        everyone = Groups(np.asarray([ALL]), np.asarray([first]), np.asarray([first + q_len - 1]))
        return int(Layout.of(self._terms[0][1], self._sizes, everyone).all_rows.sizes()[0]) == kv_len

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
        if min((cost for cost, _, _ in candidates), default=math.inf) <= row_grouping.TILE_COST * len(items) + least:
            break
        for cuts, could_cut in _ways_to_cut(rule, step, items, sizes):
            for block in _block_heights(step, sizes, cuts):
                cost, all_rows, make_layout = _estimated(rule, sizes, _row_groups(items, cuts, block, step, sizes))
                candidates.append((cost, len(candidates), make_layout))
                least = max(least, all_rows)
                # Shorter blocks run more slowly. They help only masks whose partial ranges are large even after the
                # mask's own cuts.
                if block <= 192 and (cost < math.inf or could_cut):
                    break
    for _, _, make_layout in sorted(candidates, key=lambda entry: entry[:2]):
        layout = make_layout()
        if layout.is_feasible():
            return layout
    raise AssertionError("groups of one row are always feasible")


def _ways_to_cut(rule: Rule, step: int, items: list[int], sizes: Sizes) -> Iterator[tuple[list[Ints], bool]]:
    """Yield row cuts to try (all that the mask prefers, then none), each with whether the mask prefers further cuts."""
    first, stop = sizes.q_first, sizes.q_first + sizes.shape[2]
    none = np.zeros(0, dtype=np.int64)
    can_cut = step == 1 and stop - first > 1
    wanted = [np.unique(rule.cuts(item, range(first, stop))) if can_cut else none for item in items]
    wanted = [cuts[(cuts > first) & (cuts < stop)] for cuts in wanted]
    can_cut = any(len(cuts) for cuts in wanted)
    if can_cut:
        yield wanted, False
    yield [cuts[:0] for cuts in wanted], can_cut


def _block_heights(step: int, sizes: Sizes, cuts: list[Ints]) -> list[int]:
    """Return the row-block heights to try: the longest run of rows between cuts, then smaller standard heights."""
    first, stop = sizes.q_first, sizes.q_first + sizes.shape[2]
    if stop - first == 1:
        return [1]
    edges = [np.concatenate([[first], cuts_of_item, [stop]]) for cuts_of_item in cuts]
    longest = max(int(np.diff(edges_of_item).max()) for edges_of_item in edges)
    longest = -(-longest // step)
    return [longest, *(block for block in _ROW_BLOCKS if block < longest)]


def _row_groups(items: list[int], cuts: list[Ints], block: int, step: int, sizes: Sizes) -> Groups:
    first, stop = sizes.q_first, sizes.q_first + sizes.shape[2]
    if stop - first == 1:
        row = np.full(len(items), first, dtype=np.int64)
        return Groups(np.asarray(items, dtype=np.int64), row, row, step)
    starts, ends = zip(*(_split_rows(first, stop, cuts_of_item, block, step) for cuts_of_item in cuts), strict=True)
    batch = np.repeat(np.asarray(items, dtype=np.int64), [len(starts_of_item) for starts_of_item in starts])
    return Groups(batch, np.concatenate(starts), np.concatenate(ends), step)


def _split_rows(first: int, stop: int, cuts: Ints, block: int, step: int) -> tuple[Ints, Ints]:
    """Split rows at cuts, or by residue modulo ``step``, and then into groups of at most ``block`` rows.

    Return the first and the last row of each group.
    """
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


def _estimated(rule: Rule, sizes: Sizes, groups: Groups) -> tuple[float, float, Callable[[], Layout]]:
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
