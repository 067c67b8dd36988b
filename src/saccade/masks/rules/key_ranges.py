"""KeyRanges: a mask with a few ranges of keys for each query."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
from torch import Tensor

from saccade.masks.mask import EVERYWHERE, Domain, Mask
from saccade.masks.mask_fields import Table
from saccade.plan import ALL, Groups
from saccade.plan.key_ranges import Bounds, Ints, KeyDomain, Spans


@dataclasses.dataclass(frozen=True, eq=False)
class KeyRanges(Mask):
    """A mask with a few key ranges for each query, used for bool tensors that match no standard pattern.

    Row r of L rows is at position ``columns - L + r``, as in `Dense`. A single row applies to every query.

    Args:
        starts, ends: int64 ``[items, rows, ranges]``, sorted and disjoint in each row. Empty ranges start at
            ``columns``, end at 0 and come last. A single item applies to the full batch.
        columns: number of keys.

    Cost: 16 bytes per range. Bounds are exact for single rows; for several rows, they are the hulls of the first
        ranges of all rows, of the second ranges of all rows, and so on.
    """

    starts: Ints
    ends: Ints
    columns: int
    _hash: ClassVar[int]
    _table: ClassVar[Table]
    is_fact_of_batch = True

    def __post_init__(self) -> None:
        content = (self.starts.shape, self.columns, self.starts.tobytes(), self.ends.tobytes())
        object.__setattr__(self, "_hash", hash(content))
        object.__setattr__(self, "_table", Table(np.stack([self.starts, self.ends])))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeyRanges) or self._hash != other._hash or self.columns != other.columns:
            return False
        return np.array_equal(self.starts, other.starts) and np.array_equal(self.ends, other.ends)

    def __hash__(self) -> int:
        return self._hash

    @property
    def shape(self) -> tuple[int, int]:
        return (len(self.starts), 1)

    @property
    def hides_keys_only(self) -> bool:
        return self.starts.shape[1] == 1

    @property
    def domain(self) -> Domain:
        rows = self.starts.shape[1]
        if rows == 1:
            return EVERYWHERE if self.columns == 1 else Domain(None, range(self.columns))
        return Domain(range(self.columns - rows, self.columns), range(self.columns))

    @property
    def first_row(self) -> int:
        """Query position of the first row of key ranges; 0 if a single row applies to every query."""
        return 0 if self.hides_keys_only else self.columns - self.starts.shape[1]

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        table = self._table.on(q.device)
        _, items, rows, ranges = table.shape
        item, row, inside = (b if items > 1 else 0), q - q, q == q
        if rows > 1:
            row = q - self.first_row
            inside = (row >= 0) & (row < rows)
            row = row.clamp(0, rows - 1)
        allowed = kv != kv
        for number in range(ranges):
            # Index single entries, because FlexAttention cannot compile an index that mixes slices and positions.
            start, end = table[0, item, row, number], table[1, item, row, number]
            allowed = allowed | ((kv >= start) & (kv < end))
        return allowed & inside

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        items, rows, _ = self.starts.shape
        low, high = (x - self.first_row for x in (groups.first, groups.last))
        if rows == 1:
            low = high = np.zeros_like(low)
        some, every = (low < rows) & (high >= 0), (low >= 0) & (high < rows)
        low, high, nothing = np.clip(low, 0, rows - 1), np.clip(high, 0, rows - 1), Spans.nothing(keys)
        if items > 1 and (groups.batch == ALL).any():
            tables = (self.starts.min(0), self.ends.max(0), self.starts.max(0), self.ends.min(0))
        else:
            offset = groups.batch * rows if items > 1 else 0
            low, high = low + offset, high + offset
            starts, ends = (x.reshape(items * rows, -1) for x in (self.starts, self.ends))
            if (low == high).all() and np.array_equal(some, every):
                return Bounds.exactly(Spans.of(starts[low], ends[low], keys).where(some, nothing))
            tables = (starts, ends, starts, ends)
        sides = (np.minimum, np.maximum, np.maximum, np.minimum)
        first, stop, sure_first, sure_stop = (_extreme_in_rows(*x, low, high) for x in zip(sides, tables, strict=True))
        any_row = Spans.of(first, stop, keys).where(some, nothing)
        return Bounds(any_row, Spans.of(sure_first, sure_stop, keys).where(every, nothing))

    def __repr__(self) -> str:
        items, rows, ranges = self.starts.shape
        return f"KeyRanges(items={items}, rows={rows}, columns={self.columns}, at_most={ranges})"


def _extreme_in_rows(reduction: np.ufunc, numbers: Ints, low: Ints, high: Ints) -> Ints:
    """Return the minimum or maximum of range starts or ends ``[rows, ranges]`` over rows ``low`` to ``high``."""
    pairs = np.stack([low, high + 1], 1).ravel()
    # Every second result lies between two groups. `reduceat` takes no index after the last row.
    pairs = pairs[:-1] if pairs[-1] == len(numbers) else pairs
    if pairs.max() == len(numbers):
        numbers = np.concatenate([numbers, numbers[-1:]])
    reduced: Ints = reduction.reduceat(numbers, pairs)[::2]
    return reduced
