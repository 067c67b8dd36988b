"""The rule that says the same as one range of keys a row: guessed from where ranges end, and compared with all."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from saccade.masks.mask import Mask
from saccade.masks.rules.causal import Causal
from saccade.masks.rules.documents import Documents
from saccade.masks.rules.full import Full
from saccade.masks.rules.padding import Padding
from saccade.masks.rules.prefix import Prefix
from saccade.masks.rules.window import Window
from saccade.plan.key_ranges import Ints

__all__ = ["RowRanges", "named"]


class RowRanges(NamedTuple):
    """One range of keys for each row.

    Attributes:
        starts, ends: int64 ``[items, rows]``; a row that sees nothing starts at ``columns`` and ends at 0.
        columns: number of keys; the last row stands at the last of them, a single one for every query.
    """

    starts: Ints
    ends: Ints
    columns: int

    @property
    def position(self) -> Ints:
        """Of each row."""
        rows = self.starts.shape[1]
        return np.arange(self.columns - rows, self.columns)


def named(ranges: RowRanges) -> Mask | None:
    """The rule that allows just these keys: causal, a window, padding, documents, or what is joined of them.

    Cost: O(items * rows).
    """
    if not (ranges.starts < ranges.ends).any():
        return ~Full()
    rule = _window(ranges, 0, ranges.columns)
    if rule is not None:
        return rule
    first, stop = ranges.starts.min(1), ranges.ends.max(1)
    keys = _padding(first, stop, ranges.columns)
    rule = None if keys is None else _window(ranges, first[:, None], stop[:, None])
    if keys is not None and rule is not None:
        return keys if isinstance(rule, Full) else rule & keys
    return _documents(ranges) if ranges.starts.shape[1] == ranges.columns > 1 else None


def _window(ranges: RowRanges, first: Ints | int, stop: Ints | int) -> Mask | None:
    """The window through which each row sees its keys of those from ``first`` to ``stop``; None if it is none."""
    (starts, ends, _), position = ranges, ranges.position
    some = starts < ends
    distances = (position - starts)[some & (starts > first)], (ends - 1 - position)[some & (ends < stop)]
    left, right = (int(x.max()) if len(x) else None for x in distances)
    if left is right is None:
        rule: Mask = Full()
    elif min(left or 0, right or 0) < 0 or len(position) == 1:
        return None
    else:
        rule = Causal() if (left, right) == (None, 0) else Window(left, right)
    low = first if left is None else np.maximum(first, position - left)
    high = stop if right is None else np.minimum(stop, position + right + 1)
    is_same = np.where(some, (starts == low) & (ends == high), np.greater_equal(low, high))
    return rule if is_same.all() else None


def _padding(first: Ints, stop: Ints, columns: int) -> Mask | None:
    """What hides all keys but those from ``first[b]`` to ``stop[b]``."""
    nothing = first >= stop
    if (nothing | (first == 0)).all():
        return Prefix(int(stop[0])) if len(stop) == 1 else Padding(stop.tolist())
    if (nothing | (stop == columns)).all():
        return Padding((columns - first).tolist(), side="left", padded_len=columns)
    return None


def _documents(ranges: RowRanges) -> Mask | None:
    """Documents that end where no row before sees a key behind, and none behind sees a key before."""
    (starts, ends, columns), position = ranges, ranges.position
    before = np.maximum.accumulate(ends, 1)[:, :-1]
    behind = np.minimum.accumulate(starts[:, ::-1], 1)[:, -2::-1]
    # What stands behind the last key that is seen belongs to no document: in one it would see itself.
    total = ends.max(1)[:, None]
    begins = np.pad((before <= position[1:]) & (behind >= position[1:]), ((0, 0), (1, 0)), constant_values=True)
    begins &= position < total
    first = np.maximum.accumulate(np.where(begins, position, 0), 1)
    stop = np.where(begins, position, total)[:, ::-1]
    stop = np.append(np.minimum.accumulate(stop, 1)[:, -2::-1], total, 1)
    rule = _window(ranges, np.where(position < total, first, columns), np.where(position < total, stop, 0))
    if rule is None:
        return None
    lengths = [np.diff(np.flatnonzero(own), append=end).tolist() for own, end in zip(begins, total, strict=True)]
    return Documents(lengths, None if isinstance(rule, Full) else rule)
