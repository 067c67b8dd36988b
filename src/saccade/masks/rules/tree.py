"""Tree: a mask in which each token sees itself and its ancestors in a tree, for drafts in speculative decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from saccade.masks.mask import Domain, Mask
from saccade.masks.mask_fields import Table, items_of
from saccade.masks.rules.causal import Causal
from saccade.masks.rules.tree_paths import TreePaths
from saccade.plan import ALL, Box, Groups
from saccade.plan.key_ranges import Bounds, Ints, KeyDomain, Spans
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import shown, value_error
from saccade.support.validation import are_integers

_SMALL = 64  # number of tokens; computing all pairs of a smaller tree is cheaper than reading its paths
_RULE = "be an int per token: the index of an earlier token, or -1 for a root"


@argument_hints(parents="Tree([-1, 0, 0, 1]): the index of the parent of each token, -1 for a root")
@dataclasses.dataclass(frozen=True)
class Tree(Mask):
    """A mask in which each token of a tree sees itself and its ancestors. Several roots make several trees.

    Speculative decoding verifies many drafts at once. Drafts with a common beginning share its tokens and are stored in
    one sequence, each token after its parent. After a context of n tokens that all drafts see, the mask is
    ``Causal() & (Prefix(n) | Tree(parents).after(n))``.

    >>> print(Tree([-1, 0, 0, 1, 2]).picture(5))
    1 . . . .
    1 1 . . .
    1 . 1 . .
    1 1 . 1 .
    1 . 1 . 1

    A token's position in its draft is its depth (`depths`), so pass ``n + depths`` to the position encoding. The mask
    uses indices in the sequence, because it must distinguish tokens at the same depth.

    Args:
        parents: for each token, the index of its parent, which is an earlier token, or -1 for a root: ints ``[len]``
            for all batch items, or ``[batch, len]`` (lists or a tensor). Positions after the tokens of a shorter item
            see nothing.

    Raises:
        ValueError: a number is neither -1 nor the index of an earlier token, or there are no tokens.
        TypeError: ``parents`` is not a list or tensor.

    Cost: O(tokens · log(depth)) time and O(tokens) memory, because no paths are stored. A plan reads, for each block of
    rows, only the tokens on its paths, so that long branches of a prompt cost what they would cost alone.

    Reference: Miao et al. 2024, arXiv:2305.09781, section 4 (SpecInfer); Cai et al. 2024, arXiv:2401.10774 (Medusa).
    """

    parents: tuple[tuple[int, ...], ...]
    # Derived from the parents; not part of the value of the mask.
    _paths: ClassVar[tuple[TreePaths, ...]]
    _intervals: ClassVar[Table]
    _depths: ClassVar[Table]
    is_causal = True
    is_fact_of_batch = True

    def __init__(self, parents: Sequence[int] | Sequence[Sequence[int]] | Tensor):
        values = items_of("parents", parents, _RULE)
        rows = values if values and isinstance(values[0], Iterable) else [values]
        items = tuple(_parents_of_item(row) for row in rows)
        longest = max(map(len, items))
        paths = tuple(map(TreePaths, items))
        table = np.full((3, len(items), longest), -1, dtype=np.int64)
        for number, own in enumerate(paths):
            table[:, number, : len(own)] = own.index, own.end, own.depth
        object.__setattr__(self, "parents", items)
        object.__setattr__(self, "_paths", paths)
        object.__setattr__(self, "_intervals", Table(table[:2]))
        object.__setattr__(self, "_depths", Table(table[2]))

    @property
    def depths(self) -> Tensor:
        """Number of ancestors of each token, int64 ``[items, len]``; -1 after the tokens of a shorter item."""
        return self._depths.on(torch.device("cpu"))

    @property
    def shape(self) -> tuple[int, int]:
        return (len(self.parents), 1)

    @property
    def domain(self) -> Domain:
        longest = max(map(len, self.parents))
        return Domain(range(longest), range(longest))

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        table = self._intervals.on(q.device)
        _, items, length = table.shape
        item = b if items > 1 else 0
        inside = (q >= 0) & (q < length) & (kv >= 0) & (kv < length)
        row, column = q.clamp(0, length - 1), kv.clamp(0, length - 1)
        first, index, end = table[0, item, column], table[0, item, row], table[1, item, column]
        return inside & (first <= index) & (index < end)

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        longest, is_one = max(map(len, self._paths)), len(self._paths) == 1
        is_small = longest <= _SMALL and (groups.first != groups.last).any()
        if is_small or not (is_one or (groups.batch != ALL).all()):
            stop = np.where(groups.first < longest, groups.last + 1, 0)
            return Bounds(Spans.within(keys, 0, np.minimum(stop, longest)), Spans.nothing(keys))
        result = _bounds_of_item(self._paths[0], groups, keys)
        for number, paths in enumerate(self._paths[1:], 1):
            result = _bounds_of_item(paths, groups, keys).where(groups.batch == number, result)
        return result

    def partial(self, box: Box) -> bool | Hashable:
        if box.keys[0] > box.rows[-1]:
            return False
        if len(self._paths) == 1 or box.batch != ALL:
            paths = self._paths[0 if len(self._paths) == 1 else box.batch]
            span = range(min(box.rows[0], box.keys[0]), max(box.rows[-1], box.keys[-1]) + 1)
            if paths.are_in_one_run(span):
                return Causal().partial(box)
        return (self, box)

    def cuts(self, batch: int, rows: range) -> Ints:
        items = self._paths if batch == ALL or len(self._paths) == 1 else self._paths[batch : batch + 1]
        return np.concatenate([paths.cuts() for paths in items])


def _bounds_of_item(paths: TreePaths, groups: Groups, keys: KeyDomain) -> Bounds:
    """Return the bounds for groups of rows that are all in the same batch item."""
    first, last = np.maximum(groups.first, 0), np.minimum(groups.last, len(paths) - 1)
    has_rows = first <= last
    is_whole = (groups.first >= 0) & (groups.last < len(paths))
    first, last = np.where(has_rows, first, 0), np.where(has_rows, last, 0)
    any_row = _spans(paths.seen_by_any(first, last), has_rows, keys)
    if (groups.first == groups.last).all():
        return Bounds.exactly(any_row)
    return Bounds(any_row, _spans(paths.seen_by_all(first, last), is_whole, keys))


def _spans(ranges: tuple[Ints, Ints], is_used: np.ndarray[Any, Any], keys: KeyDomain) -> Spans:
    starts, ends = ranges
    return Spans.of(starts, np.where(is_used[:, None], ends, starts), keys)


def _parents_of_item(row: object) -> tuple[int, ...]:
    """Check the parents of the tokens of one batch item, and return them as ints."""
    parents = items_of("parents", row, _RULE)
    if parents and are_integers(parents) and min(parents) >= -1 and max(parents) < len(parents):
        values = np.asarray(parents, dtype=np.int64)
        if (values < np.arange(len(values))).all():
            return tuple(values.tolist())
    raise value_error("parents", _RULE, shown(row), hint="each token comes after its parent")
