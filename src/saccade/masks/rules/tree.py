"""Tree: a mask in which each token sees itself and its ancestors in a tree, for drafts in speculative decoding."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Hashable, Iterable, Sequence
from itertools import count
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from saccade.masks.mask import Domain, Mask
from saccade.masks.mask_fields import Table, items_of
from saccade.plan import ALL, Box, Groups
from saccade.plan.key_ranges import Bounds, KeyDomain, Spans
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import shown, value_error
from saccade.support.validation import are_integers

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

    Cost: O(tokens) memory, because no paths are stored.

    Reference: Miao et al. 2024, arXiv:2305.09781, section 4 (SpecInfer); Cai et al. 2024, arXiv:2401.10774 (Medusa).
    """

    parents: tuple[tuple[int, ...], ...]
    _intervals: ClassVar[Table]
    _depths: ClassVar[Table]
    is_causal = True
    is_fact_of_batch = True

    def __init__(self, parents: Sequence[int] | Sequence[Sequence[int]] | Tensor):
        values = items_of("parents", parents, _RULE)
        rows = values if values and isinstance(values[0], Iterable) else [values]
        items = tuple(_parents_of_item(row) for row in rows)
        longest = max(map(len, items))
        table = np.full((3, len(items), longest), -1, dtype=np.int64)
        for number, item in enumerate(items):
            table[:, number, : len(item)] = _intervals(item)
        object.__setattr__(self, "parents", items)
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
        is_one = len(self.parents) == 1
        if (groups.first == groups.last).all() and (is_one or (groups.batch != ALL).all()):
            pairs = zip(groups.batch.tolist(), groups.first.tolist(), strict=True)
            paths = [self._path(0 if is_one else item, row) for item, row in pairs]
            path = np.full((len(paths), max([1, *map(len, paths)])), -1, dtype=np.int64)
            for line, tokens in zip(path, paths, strict=True):
                line[: len(tokens)] = tokens
            return Bounds.exactly(Spans.of(path, np.where(path < 0, path, path + 1), keys))
        longest = max(map(len, self.parents))
        stop = np.where(groups.first < longest, groups.last + 1, 0)
        return Bounds(Spans.within(keys, 0, np.minimum(stop, longest)), Spans.nothing(keys))

    def _path(self, item: int, token: int) -> list[int]:
        """Return a token and its ancestors; an empty list for a position outside the tree."""
        parents, path = self.parents[item], []
        while 0 <= token < len(parents):
            path.append(token)
            token = parents[token]
        return path

    def partial(self, box: Box) -> bool | Hashable:
        return False if box.keys[0] > box.rows[-1] else (self, box)


def _parents_of_item(row: object) -> tuple[int, ...]:
    parents = items_of("parents", row, _RULE)
    if not (parents and are_integers(parents) and min(parents) >= -1 and all(map(operator.lt, parents, count()))):
        raise value_error("parents", _RULE, shown(row), hint="each token comes after its parent")
    return tuple(map(int, parents))


def _intervals(parents: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return the start and end of each token's interval in depth-first order and its depth, int64 ``[3, len]``.

    In this order, a token and its descendants are contiguous, so that their indices form an interval.
    """
    size = np.ones(len(parents), dtype=np.int64)
    for index in range(len(parents) - 1, -1, -1):
        if parents[index] >= 0:
            size[parents[index]] += size[index]
    first, depth, free, next_root = np.zeros_like(size), np.zeros_like(size), np.zeros_like(size), 0
    for index, parent in enumerate(parents):
        if parent < 0:
            first[index], next_root = next_root, next_root + size[index]
        else:
            first[index], depth[index] = free[parent], depth[parent] + 1
            free[parent] += size[index]
        free[index] = first[index] + 1
    return np.stack([first, first + size, depth])
