"""Needs: which keys the rows of each rank can see, and how many pairs they make, read off the mask's bounds."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from saccade.distributed.layouts import Layout
from saccade.masks import Mask
from saccade.plan import ALL, Groups
from saccade.plan.key_ranges import Ints, Universe

__all__ = ["Needs", "work_of_chunks"]

_ROWS, _MOST_GROUPS = 128, 1 << 15  # rows that are asked about at once, and how many times


class Needs:
    """The keys that each rank needs, as ranges.

    Args:
        mask: on positions.
        layout: who holds which rows.

    Attributes:
        layout: as given.
        ranks: int64 ``[ranges]``, whose each range is; ascending.
        starts, stops: int64 ``[ranges]``: sorted and apart for each rank.
        pairs: reckoned for each rank, int64 ``[ranks]``: where some rows of a block see a key and others do not, half.

    Cost: O(tokens / 128) of NumPy, or less; no look at pairs.
    """

    def __init__(self, mask: Mask, layout: Layout):
        self.layout = layout
        groups = _Groups.of(mask, layout.starts, layout.stops)
        owner = layout.owners[groups.chunk]
        pairs = np.bincount(owner, groups.pairs, layout.ranks)
        self.pairs: Ints = (pairs / groups.items).astype(np.int64)
        rank = np.repeat(owner, groups.starts.shape[1])
        self.ranks, self.starts, self.stops = _joined(rank, groups.starts.ravel(), groups.stops.ravel(), layout.seq_len)

    @cached_property
    def received(self) -> Ints:
        """Keys that each rank gets from others, int64 ``[ranks]``."""
        total = np.bincount(self.ranks, self.stops - self.starts, self.layout.ranks).astype(np.int64)
        return total - self._own

    @cached_property
    def sent(self) -> Ints:
        """Keys that each rank gives to others, counted for each of them, int64 ``[ranks]``."""
        edges = np.concatenate([self.starts, self.stops])
        order = np.argsort(edges, kind="stable")
        steps = np.concatenate([np.ones(len(self.starts)), -np.ones(len(self.stops))])[order]
        edges, readers = edges[order].astype(np.float64), np.cumsum(steps)
        area = np.concatenate([[0.0], np.cumsum(readers[:-1] * np.diff(edges))]) if len(edges) else np.zeros(1)

        def before(place: Ints) -> np.ndarray:
            """Readers of all keys before a place, added up: a broken line."""
            return np.interp(place, edges, area) if len(edges) else np.zeros(len(place))

        layout = self.layout
        of_chunks = before(layout.stops) - before(layout.starts)
        sent: Ints = np.bincount(layout.owners, of_chunks, layout.ranks).round().astype(np.int64)
        sent -= self._own
        return sent

    def from_others(self, rank: int) -> list[tuple[int, range]]:
        """(peer, keys) that a rank gets, in the order of the keys."""
        own = self.ranks == rank
        return [piece for piece in self._pieces(self.starts[own], self.stops[own]) if piece[0] != rank]

    def to_others(self, rank: int) -> list[tuple[int, range]]:
        """(peer, keys) that a rank gives, by peer and in the order of the keys."""
        found: list[tuple[int, range]] = []
        for span in self.layout.rows(rank):
            touched = (self.starts < span.stop) & (self.stops > span.start) & (self.ranks != rank)
            starts, stops = np.maximum(self.starts[touched], span.start), np.minimum(self.stops[touched], span.stop)
            keys = map(range, starts.tolist(), stops.tolist())
            found += list(zip(self.ranks[touched].tolist(), keys, strict=True))
        return sorted(found, key=lambda piece: (piece[0], piece[1].start))

    def _pieces(self, starts: Ints, stops: Ints) -> list[tuple[int, range]]:
        """Ranges cut where the holder changes."""
        layout = self.layout
        found: list[tuple[int, range]] = []
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            first = int(np.searchsorted(layout.stops, start, "right"))
            last = int(np.searchsorted(layout.starts, stop, "left"))
            for chunk in range(first, last):
                keys = range(max(start, int(layout.starts[chunk])), min(stop, int(layout.stops[chunk])))
                holder = int(layout.owners[chunk])
                if found and found[-1][0] == holder and found[-1][1].stop == keys.start:
                    found[-1] = (holder, range(found[-1][1].start, keys.stop))
                else:
                    found.append((holder, keys))
        return found

    @cached_property
    def _own(self) -> Ints:
        """Keys that a rank needs and holds itself."""
        layout, width = self.layout, self.layout.seq_len + 1
        lengths = np.concatenate([[0], np.cumsum(self.stops - self.starts)])
        marks = self.ranks * width + self.starts

        def before(place: Ints) -> Ints:
            """Needed keys of all lower ranks, and of the own one before a place."""
            which = np.searchsorted(marks, layout.owners * width + place, "right")
            last = np.maximum(which - 1, 0)
            is_own = (which > 0) & (self.ranks[last] == layout.owners) if len(marks) else which > 0
            over = np.where(is_own, np.maximum(self.stops[last] - place, 0), 0) if len(marks) else np.zeros(len(place))
            return (lengths[which] - over).astype(np.int64)

        of_chunks = before(layout.stops) - before(layout.starts)
        return np.bincount(layout.owners, of_chunks, layout.ranks).astype(np.int64)


def work_of_chunks(mask: Mask, seq_len: int, size: int) -> Ints:
    """Pairs that the rows of each chunk make, reckoned as in `Needs`, int64 ``[chunks]``."""
    starts = np.arange(0, seq_len, size)
    groups = _Groups.of(mask, starts, np.minimum(starts + size, seq_len))
    return (np.bincount(groups.chunk, groups.pairs, len(starts)) / groups.items).astype(np.int64)


class _Groups(NamedTuple):
    """Blocks of rows, and what a mask says of each.

    Attributes:
        chunk: which chunk a block belongs to, int64 ``[blocks]``.
        starts, stops: ranges of keys that some row sees, int64 ``[blocks, slots]``.
        pairs: reckoned, float ``[blocks]``, over all batch items that the mask tells apart.
        items: how many these are.
    """

    chunk: Ints
    starts: Ints
    stops: Ints
    pairs: np.ndarray
    items: int

    @classmethod
    def of(cls, mask: Mask, starts: Ints, stops: Ints) -> _Groups:
        length = int(stops[-1]) if len(stops) else 0
        rows = max(_ROWS, -(-length // _MOST_GROUPS))
        counts = -(-(stops - starts) // rows)
        chunk = np.repeat(np.arange(len(starts)), counts)
        number = np.arange(len(chunk)) - np.repeat(np.cumsum(counts) - counts, counts)
        first = starts[chunk] + number * rows
        last = np.minimum(first + rows, stops[chunk]) - 1
        items = mask.shape[0]
        batch = np.repeat(np.arange(items) if items > 1 else np.asarray([ALL]), len(first))
        chunk, first, last = (np.tile(x, items) for x in (chunk, first, last))
        keys = Universe(np.zeros_like(first), np.full_like(first, length))
        bounds = mask.bounds(Groups(batch, first, last), keys)
        pairs = (last - first + 1) * (bounds.needed.sizes() + bounds.sure.sizes()) / 2
        return cls(chunk, bounds.needed.starts, bounds.needed.ends, pairs, items)


def _joined(ranks: Ints, starts: Ints, stops: Ints, length: int) -> tuple[Ints, Ints, Ints]:
    """Ranges of each rank, sorted, those that touch joined and the empty ones left out."""
    kept = starts < stops
    width = length + 2  # ranges of one rank never touch those of the next
    low, high = ranks[kept] * width + starts[kept], ranks[kept] * width + stops[kept]
    order = np.argsort(low, kind="stable")
    low, high = low[order], high[order]
    if not len(low):
        return low, low, low
    reach = np.maximum.accumulate(high)
    opens = np.concatenate([[True], low[1:] > reach[:-1]])
    first = np.flatnonzero(opens)
    last = np.concatenate([first[1:], [len(low)]]) - 1
    low, high = low[first], reach[last]
    return low // width, low % width, high - low // width * width
