"""Groups of rows that a plan treats together, and the ways to divide its rows into groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from saccade.plan.key_ranges import Ints

if TYPE_CHECKING:
    from saccade.plan.layout import Sizes
    from saccade.plan.tiles import Rule

_ROW_BLOCKS = (768, 192, 48, 12, 1)


class Groups(NamedTuple):
    """Groups of rows that a plan treats together: batch items, first and last positions, as arrays ``[groups]``.

    With a ``step`` above 1, a group contains every step-th position, starting with the first, and only keys with
    ``(query - key) % step == 0``.
    """

    batch: Ints
    """Index of the batch item, or `ALL` if bounds must be valid for all items."""
    first: Ints
    last: Ints
    step: int = 1

    @property
    def rows(self) -> Ints:
        """Number of rows in each group of a plan."""
        return (self.last - self.first) // self.step + 1

    def at(self, which: Ints) -> Groups:
        """Return the groups of rows with the given indices."""
        return Groups(self.batch[which], self.first[which], self.last[which], self.step)


def ways_to_cut(rule: Rule, step: int, items: list[int], sizes: Sizes) -> Iterator[tuple[list[Ints], bool]]:
    """Yield row cuts to try (all that the mask prefers, then none), each with whether the mask prefers further cuts."""
    first, stop = sizes.q_first, sizes.q_first + sizes.shape[2]
    none = np.zeros(0, dtype=np.int64)
    can_cut = step == 1 and stop - first > 1
    wanted = [_distinct(rule.cuts(item, range(first, stop))) if can_cut else none for item in items]
    wanted = [cuts[(cuts > first) & (cuts < stop)] for cuts in wanted]
    can_cut = any(len(cuts) for cuts in wanted)
    if can_cut:
        yield wanted, False
    yield [cuts[:0] for cuts in wanted], can_cut


def block_heights(step: int, sizes: Sizes, cuts: list[Ints]) -> list[int]:
    """Return the row-block heights to try: the longest run of rows between cuts, then smaller standard heights."""
    first, stop = sizes.q_first, sizes.q_first + sizes.shape[2]
    if stop - first == 1:
        return [1]
    edges = [np.concatenate([[first], cuts_of_item, [stop]]) for cuts_of_item in cuts]
    longest = max(int(np.diff(edges_of_item).max()) for edges_of_item in edges)
    longest = -(-longest // step)
    return [longest, *(block for block in _ROW_BLOCKS if block < longest)]


def row_groups(items: list[int], cuts: list[Ints], block: int, step: int, sizes: Sizes) -> Groups:
    """Return the rows of the given batch items, split at each item's cuts into groups of at most ``block`` rows."""
    first, stop = sizes.q_first, sizes.q_first + sizes.shape[2]
    if stop - first == 1:
        row = np.full(len(items), first, dtype=np.int64)
        return Groups(np.asarray(items, dtype=np.int64), row, row, step)
    starts, ends = zip(*(_split_rows(first, stop, cuts_of_item, block, step) for cuts_of_item in cuts), strict=True)
    batch = np.repeat(np.asarray(items, dtype=np.int64), [len(starts_of_item) for starts_of_item in starts])
    return Groups(batch, np.concatenate(starts), np.concatenate(ends), step)


def _distinct(cuts: Ints) -> Ints:
    """Return the distinct cuts in order. They mostly are in order, so that a stable sort is faster than `np.unique`."""
    cuts = np.sort(cuts, kind="stable")
    return cuts[np.diff(cuts, prepend=cuts[:1] - 1) > 0]


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
