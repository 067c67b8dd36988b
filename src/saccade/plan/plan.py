"""Plan: the tiles that hold every allowed pair of a rule; the cheapest way to group its rows.

A plan is made from what a rule says about *groups of rows*, never by looking at pairs. Rows are grouped in a few
ways (all at once, blocks of 768 or 192, cut where the rule wants cuts, batch items together or apart), each way is
estimated in pairs of query and key, and the cheapest is kept.
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
_SAMPLE = 1024  # groups on which the cost of a larger layout is estimated
_KEPT_TILES = 4096  # tiles that a plan keeps; more are made anew each time


class Plan:
    """The tiles to compute for one rule at one size, made as they are asked for.

    Args:
        shape: (batch, heads, q_len, kv_len), the box that the plan covers.
        terms: disjoint rules that make up the rule, each with its step; none where there is nothing to compute.
        q_first, kv_first: positions of the first query and the first key.

    Attributes:
        overlaps: True if a row may stand in several tiles, whose results are then merged by their lse; the keys of
            such tiles are disjoint. Otherwise every row stands in exactly one tile, which may have no columns.
        memo: what kernels derive from this plan and may keep as long as it lives (residual tensors, by key).

    Cost: nothing before tiles are asked for: a kernel that reads the rule's bounds itself does without them.
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
        """In the order of their rows."""
        return _Tiles(self._layouts, self.count)

    @cached_property
    def count(self) -> int:
        """How many tiles there are."""
        return sum([len(layout.groups.first) for layout in self._layouts])

    @cached_property
    def pairs(self) -> int:
        """How many query-key pairs the tiles hold, over batch and heads: at least the visible ones."""
        return int(sum((layout.copies * layout.groups.rows * layout.widths).sum() for layout in self._layouts))

    @cached_property
    def is_full(self) -> bool:
        """True if the rule surely lets every query attend to every key."""
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
    """The tiles of some layouts; many of them are made anew each time."""

    def __init__(self, groupings: tuple[Layout, ...], count: int):
        self._layouts, self._count = groupings, count
        self._kept: tuple[Tile, ...] | None = None

    def __iter__(self) -> Iterator[Tile]:
        if self._kept is None and self._count <= _KEPT_TILES:
            self._kept = tuple(tile for layout in self._layouts for tile in layout.tiles())
        if self._kept is not None:
            return iter(self._kept)
        return (tile for layout in self._layouts for tile in layout.tiles())


def make(
    rule: Rule, shape: tuple[int, int, int, int], *, q_first: int, kv_first: int, whole_rows: bool = False
) -> Plan:
    """Return the cheapest plan for a rule.

    Args:
        rule: what may attend to what, on positions.
        shape: (batch, heads, q_len, kv_len).
        q_first, kv_first: positions of the first query and the first key; the others follow one by one.
        whole_rows: every row must stand in one tile, even where a rule falls into terms with different steps.

    Cost: O(rows / 192) for structured masks, and nothing that grows with q_len * kv_len.
    """
    if 0 in shape:
        return Plan(shape)
    terms = [(1, rule)] if whole_rows else rule.terms()
    # No query and no key are further apart than this: a longer step joins no more of them, and no fewer.
    span = max(q_first + shape[2], kv_first + shape[3]) - min(q_first, kv_first)
    return Plan(shape, [(min(step, span), term) for step, term in terms], q_first, kv_first)


def _cheapest(rule: Rule, step: int, sizes: Sizes) -> Layout:
    """Cost the ways to group the rows, large ones on a sample, and keep the cheapest that is feasible."""
    candidates: list[tuple[float, int, Callable[[], Layout]]] = []
    batch, least = sizes.shape[0], 0.0
    for items in [[ALL]] if rule.shape[0] == 1 or batch == 1 else [[ALL], list(range(batch))]:
        # Apart, each item has a tile at least, and the keys that are sure for all: more than that need not be asked.
        if min((cost for cost, _, _ in candidates), default=math.inf) <= row_grouping.TILE_COST * len(items) + least:
            break
        for cuts, could_cut in _ways(rule, step, items, sizes):
            for block in _blocks(step, sizes, cuts):
                cost, all_rows, made = _sampled(rule, sizes, _grouped(items, cuts, block, step, sizes))
                candidates.append((cost, len(candidates), made))
                least = max(least, all_rows)
                # Shorter blocks are slower to run; they are for rules that leave too much unsure even where the rows
                # are cut as the rule wishes.
                if block <= 192 and (cost < math.inf or could_cut):
                    break
    for _, _, made in sorted(candidates, key=lambda entry: entry[:2]):
        layout = made()
        if layout.is_feasible():
            return layout
    raise AssertionError("groups of one row are always feasible")


def _ways(rule: Rule, step: int, items: list[int], sizes: Sizes) -> Iterator[tuple[list[Ints], bool]]:
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


def _blocks(step: int, sizes: Sizes, cuts: list[Ints]) -> list[int]:
    """Heights to try, largest first; of those that no run of rows between two cuts reaches, the smallest only."""
    first, stop = sizes.q_first, sizes.q_first + sizes.shape[2]
    if stop - first == 1:
        return [1]
    edges = [np.concatenate([[first], own, [stop]]) for own in cuts]
    longest = max(int(np.diff(own).max()) for own in edges)
    longest = -(-longest // step)
    return [longest, *(block for block in _ROW_BLOCKS if block < longest)]


def _grouped(items: list[int], cuts: list[Ints], block: int, step: int, sizes: Sizes) -> Groups:
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


def _sampled(rule: Rule, sizes: Sizes, groups: Groups) -> tuple[float, float, Callable[[], Layout]]:
    """Return a grouping's cost (inf if not feasible), that of its sure keys, and its layout; from a sample if large."""
    count = len(groups.first)
    some = groups.at(np.unique(np.linspace(0, count - 1, _SAMPLE).astype(np.int64))) if count > _SAMPLE else groups
    layout = Layout.of(rule, sizes, some)
    share = count / len(some.first)
    cost = layout.cost() * share if layout.is_feasible() else math.inf
    made = (lambda: layout) if some is groups else partial(Layout.of, rule, sizes, groups)
    return cost, layout.cost_of_sure() * share, made
