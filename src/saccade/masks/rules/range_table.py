"""RangeTable: base class of masks in which each query sees a few ranges of keys, stored in a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor

from saccade.masks.mask import Domain, Mask
from saccade.masks.rules.key_ranges import KeyRanges
from saccade.plan import Box, Groups
from saccade.plan.key_ranges import Bounds, Ints, KeyDomain


class RangeTable(Mask):
    """Base class of masks with a table of key ranges, which has one row per query position.

    A subclass calls `_set_ranges` in its constructor. Equality and hash depend on the subclass's fields.

    Cost: 16 bytes for each range of each position.
    """

    _ranges: ClassVar[KeyRanges]
    _length: ClassVar[int]

    def _set_ranges(self, starts: Sequence[Ints], ends: Sequence[Ints]) -> None:
        """Store the key ranges of each batch item, int64 ``[rows, ranges]``, disjoint and ascending within a row.

        Empty ranges may be anywhere in a row. Positions after the last row of a shorter item see nothing.
        """
        length = max(len(item) for item in starts)
        rows = max(length, 2)  # `KeyRanges` applies a single row to every query
        table = np.empty((2, len(starts), rows, starts[0].shape[1]), dtype=np.int64)
        table[0], table[1] = rows, 0  # an empty range
        for number, (first, stop) in enumerate(zip(starts, ends, strict=True)):
            empty = stop <= first
            is_in_order = not (empty[:, :-1] & ~empty[:, 1:]).any()
            order = None if is_in_order else np.argsort(empty, axis=1, kind="stable")  # empty ranges come last
            for side, values, filler in ((0, first, rows), (1, stop, 0)):
                given = np.where(empty, filler, values)
                table[side, number, : len(first)] = given if order is None else np.take_along_axis(given, order, 1)
        object.__setattr__(self, "_ranges", KeyRanges(table[0], table[1], rows))
        object.__setattr__(self, "_length", length)

    @property
    def shape(self) -> tuple[int, int]:
        return self._ranges.shape

    @property
    def domain(self) -> Domain:
        return Domain(range(self._length), range(self._length))

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return self._ranges.allows(b, h, q, kv)

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        return self._ranges.bounds(groups, keys)

    def partial(self, box: Box) -> tuple[KeyRanges, Box]:
        return (self._ranges, box)
