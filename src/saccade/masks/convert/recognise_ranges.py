"""Recognition of standard patterns, such as a window or padding, from the range of keys that each row sees."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from saccade.masks.convert.patterns import window_of
from saccade.masks.mask import Mask
from saccade.masks.rules.documents import Documents
from saccade.masks.rules.full import Full
from saccade.masks.rules.padding import Padding
from saccade.masks.rules.prefix import Prefix
from saccade.plan.key_ranges import Ints


class RowRanges(NamedTuple):
    """The range of visible keys of each row. Standard mask patterns are recognised from these ranges.

    Attributes:
        starts, ends: int64 ``[items, rows]``; a row without keys starts at ``columns`` and ends at 0.
        columns: number of keys; the last row is aligned with the last key. If there is only one row, it applies to
            every query.
    """

    starts: Ints
    ends: Ints
    columns: int

    @property
    def position(self) -> Ints:
        """Query position of each row of key ranges."""
        rows = self.starts.shape[1]
        return np.arange(self.columns - rows, self.columns)


def describe_ranges(ranges: RowRanges) -> Mask | None:
    """Return the standard pattern, possibly with padding, that allows exactly the given ranges; None if none does.

    A candidate is derived from the ends of the ranges and then compared with every row. Cost: O(items * rows).
    """
    if not (ranges.starts < ranges.ends).any():
        return ~Full()
    mask = _window_of_rows(ranges, 0, ranges.columns)
    if mask is not None:
        return mask
    first, stop = ranges.starts.min(1), ranges.ends.max(1)
    keys = _padding_of_rows(first, stop, ranges.columns)
    mask = None if keys is None else _window_of_rows(ranges, first[:, None], stop[:, None])
    if keys is not None and mask is not None:
        return keys if isinstance(mask, Full) else mask & keys
    return _documents_of_rows(ranges) if ranges.starts.shape[1] == ranges.columns > 1 else None


def _window_of_rows(ranges: RowRanges, first: Ints | int, stop: Ints | int) -> Mask | None:
    """Return the window mask that matches the visible ranges within keys ``first`` to ``stop``; None if none does."""
    (starts, ends, _), position = ranges, ranges.position
    some = starts < ends
    distances = (position - starts)[some & (starts > first)], (ends - 1 - position)[some & (ends < stop)]
    left, right = (int(x.max()) if len(x) else math.inf for x in distances)
    if min(left, right) < 0 or (len(position) == 1 and min(left, right) < math.inf):
        return None
    low = first if left == math.inf else np.maximum(first, position - int(left))
    high = stop if right == math.inf else np.minimum(stop, position + int(right) + 1)
    is_same = np.where(some, (starts == low) & (ends == high), np.greater_equal(low, high))
    return window_of(left, right) if is_same.all() else None


def _padding_of_rows(first: Ints, stop: Ints, columns: int) -> Mask | None:
    """Return the padding mask that allows exactly keys ``first[b]`` to ``stop[b]`` of item b; None if none does."""
    nothing = first >= stop
    if (nothing | (first == 0)).all():
        return Prefix(int(stop[0])) if len(stop) == 1 else Padding(stop.tolist())
    if (nothing | (stop == columns)).all():
        return Padding((columns - first).tolist(), side="left", padded_len=columns)
    return None


def _documents_of_rows(ranges: RowRanges) -> Mask | None:
    """Return the documents mask that matches the visible ranges; None if none does.

    A document begins where no row sees keys on the other side.
    """
    (starts, ends, columns), position = ranges, ranges.position
    before = np.maximum.accumulate(ends, 1)[:, :-1]
    behind = np.minimum.accumulate(starts[:, ::-1], 1)[:, -2::-1]
    # Keys after the last visible one belong to no document, because in a document they would see themselves.
    total = ends.max(1)[:, None]
    begins = np.pad((before <= position[1:]) & (behind >= position[1:]), ((0, 0), (1, 0)), constant_values=True)
    begins &= position < total
    first = np.maximum.accumulate(np.where(begins, position, 0), 1)
    stop = np.where(begins, position, total)[:, ::-1]
    stop = np.append(np.minimum.accumulate(stop, 1)[:, -2::-1], total, 1)
    mask = _window_of_rows(ranges, np.where(position < total, first, columns), np.where(position < total, stop, 0))
    if mask is None:
        return None
    lengths = [np.diff(np.flatnonzero(item), append=end).tolist() for item, end in zip(begins, total, strict=True)]
    return Documents(lengths, None if isinstance(mask, Full) else mask)
