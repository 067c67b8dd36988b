"""TreePaths: the paths from tokens to the roots of their trees, as ranges of consecutive tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from saccade.plan.key_ranges import Ints

Bools = npt.NDArray[np.bool_]

_MOST_RANGES = 64  # of a group of rows; a tile with more ranges would mostly copy keys
_LONG = 48  # number of tokens from which a run of tokens is worth tiles of its own


class TreePaths:
    """Paths of the tokens of one batch item to their roots.

    A *run* is a longest sequence of tokens in which each is the parent of the next. A path is a range of tokens in each
    of a few runs. In depth-first order, a token and its descendants have consecutive indices.

    Args:
        parents: for each token, the index of its parent, an earlier token, or -1 for a root.

    Attributes:
        depth: number of ancestors of each token.
        index, end: indices of each token and of the token after its last descendant, in depth-first order.

    Cost: O(tokens · log(depth)) time and O(tokens) memory, because no paths are stored.
    """

    def __init__(self, parents: Sequence[int]):
        self.parents = np.asarray(parents, dtype=np.int64)
        tokens = np.arange(len(self.parents))
        is_start = self.parents != tokens - 1
        is_start[:1] = True
        self._run, self._starts = np.cumsum(is_start) - 1, np.flatnonzero(is_start)
        self._ends = np.append(self._starts[1:], len(tokens))
        offset = tokens - self._starts[self._run]
        # Each run but those of the roots hangs on a token of an earlier run. All sums over paths are sums over runs.
        joint = self.parents[self._starts]
        is_root = joint < 0
        self._parent_run = np.where(is_root, -1, self._run[joint])
        size_of_run = _sums_over_descendants(self._parent_run, self._ends - self._starts)
        hanging = np.bincount(joint[~is_root], weights=size_of_run[~is_root], minlength=len(tokens)).astype(np.int64)
        until = np.cumsum(1 + hanging)
        size = until[self._ends - 1][self._run] - until + 1 + hanging
        # A token's own run comes first below it, and then the runs that hang on it.
        before = _sums_of_earlier_siblings(joint, size_of_run)
        step = np.stack([before + np.where(is_root, 0, offset[joint] + (size - hanging)[joint]), offset[joint] + 1])
        step[1, is_root] = 0
        index, depth = _sums_to_roots(self._parent_run, step)
        self.index, self.depth = index[self._run] + offset, depth[self._run] + offset
        self.end = self.index + size

    def __len__(self) -> int:
        return len(self.parents)

    def cuts(self) -> Ints:
        """Return the rows at which a plan should cut: the first token of each long run, and the first after it."""
        is_long = self._ends - self._starts >= _LONG
        return np.unique(np.concatenate([self._starts[is_long], self._ends[is_long]]))

    def are_in_one_run(self, tokens: range) -> bool:
        """Return whether all tokens of a range exist and are in the same run."""
        return tokens[0] >= 0 and tokens[-1] < len(self) and bool(self._run[tokens[0]] == self._run[tokens[-1]])

    def seen_by_any(self, first: Ints, last: Ints) -> tuple[Ints, Ints]:
        """Return the keys that at least one row of a group sees: starts and ends of ranges, int64 ``[groups, ranges]``.

        Groups of several rows with too many ranges get a single range, which may include other keys.

        Args:
            first, last: the first and the last row of each group, int64 ``[groups]``, both in the tree.
        """
        groups = len(first)
        touched = self._run[last] - self._run[first] + 1
        group = np.repeat(np.arange(groups), touched)
        run = np.arange(len(group)) - np.repeat(np.cumsum(touched) - touched, touched) + self._run[first][group]
        token = np.minimum(self._ends[run] - 1, last[group])
        is_capped = bool((first != last).any())
        counts = np.zeros(groups, dtype=np.int64)
        found: list[tuple[Ints, Ints, Ints]] = []
        while len(token):
            start = self._starts[self._run[token]]
            found.append((group, start, token + 1))
            counts += np.bincount(group, minlength=groups)
            token = self.parents[start]
            keep = token >= 0
            if is_capped:
                keep &= counts[group] <= _MOST_RANGES
            group, token = self._lowest_in_runs(group[keep], token[keep])
        is_coarse = (counts > _MOST_RANGES) & is_capped
        table = _as_table(found, np.where(is_coarse, 0, counts))
        if is_coarse.any():
            starts, ends = table
            starts[is_coarse, 0], ends[is_coarse, 0] = self._lowest_roots(first, last)[is_coarse], last[is_coarse] + 1
        return table

    def seen_by_all(self, first: Ints, last: Ints) -> tuple[Ints, Ints]:
        """Return keys that every row of a group sees, in the form of `seen_by_any`.

        If a group has several rows, the first row's own key is left out. Paths of many ranges are not followed to the
        root.
        """
        low, high = (_over_rows(ufunc, self.index, first, last) for ufunc in (np.minimum, np.maximum))
        token, group = np.where(first == last, first, self.parents[first]), np.arange(len(first))
        found: list[tuple[Ints, Ints, Ints]] = []
        counts = np.zeros(len(first), dtype=np.int64)
        while len(group := group[token >= 0]) and len(found) < _MOST_RANGES:
            token = token[token >= 0]
            start = self._starts[self._run[token]]
            found.append((group, start, self._last_common(start, token, low[group], high[group]) + 1))
            counts += np.bincount(group, minlength=len(first))
            token = self.parents[start]
        return _as_table(found, counts)

    def _last_common(self, start: Ints, stop: Ints, low: Ints, high: Ints) -> Ints:
        """Return, for ranges in runs, the last token of which all tokens from ``low`` to ``high`` are descendants.

        Args:
            start, stop: the first and the last token of each range.
            low, high: indices in depth-first order.

        Returns:
            int64, with the shape of the arguments; ``start - 1`` if there is no such token.
        """
        # Along a run, descendants become fewer, so that a binary search finds the token.
        least, most = start - 1, stop.copy()
        middle = most
        while (least < most).any():
            sees = (self.index[middle] <= low) & (high < self.end[middle])
            least, most = np.where(sees, middle, least), np.where(sees, most, middle - 1)
            middle = (least + most + 1) >> 1
        return least

    def _lowest_in_runs(self, group: Ints, token: Ints) -> tuple[Ints, Ints]:
        """Return the pairs of group and token without those that have a descendant in the same run and group."""
        order = np.lexsort((token, group))
        group, token = group[order], token[order]
        run = self._run[token]
        is_last = np.ones(len(token), dtype=np.bool_)
        is_last[:-1] = (np.diff(run) != 0) | (np.diff(group) != 0)
        return group[is_last], token[is_last]

    def _lowest_roots(self, first: Ints, last: Ints) -> Ints:
        """Return the smallest index of a root above the rows of each group."""
        return _over_rows(np.minimum, self._root, first, last)

    @cached_property
    def _root(self) -> Ints:
        """The root of each token."""
        up = np.where(self._parent_run < 0, np.arange(len(self._starts)), self._parent_run)
        while not np.array_equal(further := up[up], up):
            up = further
        roots: Ints = self._starts[up][self._run]
        return roots


def _over_rows(ufunc: np.ufunc, values: Ints, first: Ints, last: Ints) -> Ints:
    """Return a reduction such as the minimum over ``values[first : last + 1]`` for each group."""
    edges = np.stack([first, last + 1], axis=1).ravel()
    reduced: Ints = ufunc.reduceat(np.append(values, values[-1:]), edges)[::2]
    return reduced


def _as_table(found: list[tuple[Ints, Ints, Ints]], counts: Ints) -> tuple[Ints, Ints]:
    """Return starts and ends of ranges as two tables with a row per group; empty ranges fill the rows."""
    group, starts, ends = (np.concatenate(parts) for parts in zip(*found, strict=True)) if found else (counts[:0],) * 3
    keep = counts[group] > 0
    order = np.argsort(group[keep], kind="stable")
    group, starts, ends = (x[keep][order] for x in (group, starts, ends))
    slot = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
    table = np.zeros((2, len(counts), max(1, int(counts.max(initial=0)))), dtype=np.int64)
    table[0, group, slot], table[1, group, slot] = starts, ends
    return table[0], table[1]


def _sums_over_descendants(parents: Ints, values: Ints) -> Ints:
    """Return the sum of the values of each node and its descendants; the parent of a root is -1.

    Each step doubles the distance over which values have been added.
    """
    count, total = len(parents), values.copy()
    jump = parents
    while (below := jump >= 0).any():
        total += np.bincount(jump[below], weights=total[below], minlength=count).astype(np.int64)
        jump = np.where(below, jump[jump], -1)
    return total


def _sums_to_roots(parents: Ints, values: Ints) -> Ints:
    """Return the sums of the values ``[..., nodes]`` of each node and its ancestors; the parent of a root is -1."""
    total, jump = values.copy(), parents
    while (below := jump >= 0).any():
        total[..., below] += total[..., jump[below]]
        jump = np.where(below, jump[jump], -1)
    return total


def _sums_of_earlier_siblings(parents: Ints, values: Ints) -> Ints:
    """Return, for each node, the sum of the values of the earlier nodes that have the same parent."""
    order = np.argsort(parents, kind="stable")
    before = np.cumsum(values[order]) - values[order]
    is_first = np.diff(parents[order], prepend=-2) != 0
    before -= np.maximum.accumulate(np.where(is_first, before, 0))
    result = np.empty_like(before)
    result[order] = before
    return result
