"""TokenOrder: an index of a position table for finding the columns of the tokens at given positions."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from saccade.plan.key_ranges import Bounds, Ints, KeyDomain, Spans

_FARTHEST = 1 << 40  # larger positions, multiplied by the number of batch items, may overflow int64
_MOST_RUNS = 16  # with at most this many runs of adjacent tokens in each item, every gap is excluded


class PositionRange(NamedTuple):
    """The range of token positions in each group of rows; all fields are ``[groups]``.

    Attributes:
        first, last: positions of the first and the last token; 0 if there is no token.
        some: whether at least one row is a token, not padding.
        every: whether every row is a token.
    """

    first: Ints
    last: Ints
    some: npt.NDArray[np.bool_]
    every: npt.NDArray[np.bool_]


class TokenOrder:
    """An index of token positions that never decrease within a batch item.

    Padding may be anywhere, and positions may repeat or have gaps. Apart from padding, the tokens at positions
    ``start`` to ``stop`` are adjacent, so bisection finds them.

    Args:
        table: int64 ``[items, len]``, below 0 at padding; checked by `of`.

    Cost: one pass over the table; a lookup costs O(log(tokens)).
    """

    def __init__(self, table: Ints):
        items, self._len = table.shape
        is_token = table >= 0
        self._indices = np.flatnonzero(is_token)  # item * len + index
        self._positions = table.ravel() if len(self._indices) == table.size else table.ravel()[self._indices]
        counts = is_token.sum(axis=1)
        self._begins = np.concatenate([[0], np.cumsum(counts)])
        self._step = int(self._positions.max(initial=0)) + 2  # above the end of any range of positions
        # Batch item and position combined into one integer that increases from token to token.
        self._places = self._positions + np.repeat(np.arange(items) * self._step, counts)

    @classmethod
    def of(cls, table: Tensor) -> TokenOrder | None:
        """Build the index of a position table; return None if positions decrease or the table is not on the CPU."""
        if table.device.type != "cpu":
            return None
        rows = table.detach().numpy()
        if rows.size and int(rows.max()) > _FARTHEST:
            return None
        order = cls(rows)
        return order if bool((order._places[1:] >= order._places[:-1]).all()) else None

    @cached_property
    def items(self) -> int:
        """Number of batch items in the position table."""
        return len(self._begins) - 1

    def key_domain(self, item: Ints) -> KeyDomain:
        """Return the range of positions from the first to the last token of each item."""
        low, high = self._begins[item], self._begins[item + 1]
        return KeyDomain(*self._ends(low, high, 1))

    def among(self, item: Ints, first: Ints, last: Ints) -> PositionRange:
        """Return the range of token positions in rows ``first`` to ``last`` (inclusive) of each group."""
        offset = item * self._len
        low, high = np.searchsorted(self._indices, (offset + first, offset + last + 1))
        return PositionRange(*self._ends(low, high, 0), low < high, high - low == last - first + 1)

    def columns(self, item: Ints, positions: Spans, keys: KeyDomain) -> Bounds:
        """Return bounds on the columns of tokens at ``positions``, inexact if tokens and padding alternate often."""
        if not len(self._indices):
            return Bounds.exactly(Spans.nothing(keys))
        place, offset = (item * self._step)[:, None], (item * self._len)[:, None]
        low, high = np.searchsorted(self._places, (place + positions.starts, place + positions.ends))
        some = low < high
        starts = np.where(some, self._indices.take(low, mode="clip") - offset, 0)
        ends = np.where(some, self._indices.take(high - 1, mode="clip") + 1 - offset, 0)
        hull = Spans.of(starts, ends, keys)
        is_holed = ends - starts > high - low
        if not (some & is_holed).any():
            return Bounds.exactly(hull)
        if self._runs is None:
            return Bounds(hull, Spans.of(starts, np.where(is_holed, starts, ends), keys))
        run_starts, run_ends = self._runs
        return Bounds.exactly(hull.intersection(Spans.of(run_starts[item], run_ends[item], keys), keys))

    def consecutive_range(self, item: int, indices: range) -> range | None:
        """Return the positions of the tokens at ``indices`` as a range; None if they contain padding or a gap."""
        offset = item * self._len
        low, high = np.searchsorted(self._indices, (offset + indices.start, offset + indices.stop)).tolist()
        if high - low != len(indices) or indices.step != 1:
            return None
        positions = self._positions[low:high]
        if not (positions[1:] - positions[:-1] == 1).all():
            return None
        return range(int(positions[0]), int(positions[-1]) + 1)

    def span(self, item: int) -> range:
        """Return the range of positions from the first to the last token of one item."""
        first, stop = self.key_domain(np.asarray([item]))
        return range(int(first[0]), int(stop[0]))

    def edges(self, item: int, cuts: Ints) -> Ints:
        """Return the row indices of cuts: the first token at or after each of ``cuts``, and the ends of token runs."""
        low, high = self._begins[item : item + 2].tolist()
        at_cuts = low + np.searchsorted(self._positions[low:high], cuts)
        inner = self._indices[at_cuts[at_cuts < high]] - item * self._len
        return inner if self._runs is None else np.concatenate([inner, *(side[item] for side in self._runs)])

    @cached_property
    def _runs(self) -> tuple[Ints, Ints] | None:
        """Start and end indices of runs of adjacent tokens, ``[items, runs]``; None if there are too many runs."""
        item = np.repeat(np.arange(self.items), np.diff(self._begins))
        is_new = np.ones(len(self._indices), dtype=bool)
        is_new[1:] = (np.diff(self._indices) != 1) | (np.diff(item) != 0)
        first = np.flatnonzero(is_new)
        last = np.append(first, len(self._indices))[1:] - 1
        counts = np.bincount(item[first], minlength=self.items)
        most = int(counts.max(initial=0))
        if most > _MOST_RUNS:
            return None
        starts, ends = np.zeros((2, self.items, most), dtype=np.int64)
        slots = np.arange(most) < counts[:, None]
        starts[slots] = self._indices[first] - item[first] * self._len
        ends[slots] = self._indices[last] + 1 - item[first] * self._len
        return starts, ends

    def _ends(self, low: Ints, high: Ints, beyond: int) -> tuple[Ints, Ints]:
        """Return the positions of tokens ``low`` and ``high - 1``, the latter plus ``beyond``; 0 for empty ranges."""
        if not len(self._indices):
            return np.zeros_like(low), np.zeros_like(low)
        some = low < high
        first = np.where(some, self._positions.take(low, mode="clip"), 0)
        return first, np.where(some, self._positions.take(high - 1, mode="clip") + beyond, 0)
