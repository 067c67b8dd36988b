"""The class `KeyRequirements`: the key ranges and query-key pairs of each rank, computed from the mask's bounds."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from saccade.distributed.layouts import Layout
from saccade.masks import Mask
from saccade.plan import ALL, Groups
from saccade.plan.key_ranges import Ints, KeyDomain

_ROWS, _MOST_GROUPS = 128, 1 << 15  # rows in a block, and maximum number of blocks


class KeyRequirements:
    """The key ranges that each rank requires to compute attention for its rows.

    Args:
        mask: the attention mask.
        layout: the rows of each rank.

    Attributes:
        layout: the rows of each rank.
        ranks: int64 ``[ranges]``, the rank of each range, ascending.
        starts, stops: int64 ``[ranges]``, the bounds of the ranges, sorted and disjoint for each rank.
        pairs: int64 ``[ranks]``, the estimated number of pairs of each rank; a key that only some rows of a block see
            counts as half a pair per row.

    Cost: O(tokens / 128) NumPy operations or fewer; pairs are not evaluated.
    """

    def __init__(self, mask: Mask, layout: Layout):
        self.layout = layout
        groups = _RowBlocks.of(mask, layout.starts, layout.stops)
        owner = layout.owners[groups.chunk]
        pairs = np.bincount(owner, groups.pairs, layout.ranks)
        self.pairs: Ints = (pairs / groups.items).astype(np.int64)
        rank = np.repeat(owner, groups.starts.shape[1])
        self.ranks, self.starts, self.stops = _join_adjacent(
            rank, groups.starts.ravel(), groups.stops.ravel(), layout.seq_len
        )

    @cached_property
    def received(self) -> Ints:
        """Number of keys that each rank receives from other ranks, int64 ``[ranks]``."""
        total = np.bincount(self.ranks, self.stops - self.starts, self.layout.ranks).astype(np.int64)
        return total - self._local

    @cached_property
    def sent(self) -> Ints:
        """Number of keys that each rank sends to other ranks, counted once per receiver, int64 ``[ranks]``."""
        edges = np.concatenate([self.starts, self.stops])
        order = np.argsort(edges, kind="stable")
        steps = np.concatenate([np.ones(len(self.starts)), -np.ones(len(self.stops))])[order]
        edges, readers = edges[order].astype(np.float64), np.cumsum(steps)
        area = np.concatenate([[0.0], np.cumsum(readers[:-1] * np.diff(edges))]) if len(edges) else np.zeros(1)

        def before(position: Ints) -> np.ndarray:
            """Return how often all ranks together read the keys before each position."""
            return np.interp(position, edges, area) if len(edges) else np.zeros(len(position))

        layout = self.layout
        of_chunks = before(layout.stops) - before(layout.starts)
        sent: Ints = np.bincount(layout.owners, of_chunks, layout.ranks).round().astype(np.int64)
        sent -= self._local
        return sent

    def from_others(self, rank: int) -> list[tuple[int, range]]:
        """Return the (peer, keys) pairs that a rank receives, in the order of the keys."""
        any_row = self.ranks == rank
        return [piece for piece in self._pieces(self.starts[any_row], self.stops[any_row]) if piece[0] != rank]

    def to_others(self, rank: int) -> list[tuple[int, range]]:
        """Return the (peer, keys) pairs that a rank sends, ordered by peer and then by key."""
        pieces: list[tuple[int, range]] = []
        for span in self.layout.rows(rank):
            touched = (self.starts < span.stop) & (self.stops > span.start) & (self.ranks != rank)
            starts, stops = np.maximum(self.starts[touched], span.start), np.minimum(self.stops[touched], span.stop)
            keys = map(range, starts.tolist(), stops.tolist())
            pieces += list(zip(self.ranks[touched].tolist(), keys, strict=True))
        return sorted(pieces, key=lambda piece: (piece[0], piece[1].start))

    def _pieces(self, starts: Ints, stops: Ints) -> list[tuple[int, range]]:
        """Split required key ranges by the rank that stores the keys; return (rank, keys) pairs."""
        layout = self.layout
        pieces: list[tuple[int, range]] = []
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            first = int(np.searchsorted(layout.stops, start, "right"))
            last = int(np.searchsorted(layout.starts, stop, "left"))
            for chunk in range(first, last):
                keys = range(max(start, int(layout.starts[chunk])), min(stop, int(layout.stops[chunk])))
                owner = int(layout.owners[chunk])
                if pieces and pieces[-1][0] == owner and pieces[-1][1].stop == keys.start:
                    pieces[-1] = (owner, range(pieces[-1][1].start, keys.stop))
                else:
                    pieces.append((owner, keys))
        return pieces

    @cached_property
    def _local(self) -> Ints:
        """Number of required keys that each rank stores itself and need not receive."""
        layout, width = self.layout, self.layout.seq_len + 1
        lengths = np.concatenate([[0], np.cumsum(self.stops - self.starts)])
        marks = self.ranks * width + self.starts

        def before(position: Ints) -> Ints:
            """Count the keys that lower ranks require, plus those that each chunk's rank requires before a position."""
            which = np.searchsorted(marks, layout.owners * width + position, "right")
            last = np.maximum(which - 1, 0)
            is_local = (which > 0) & (self.ranks[last] == layout.owners) if len(marks) else which > 0
            over = (
                np.where(is_local, np.maximum(self.stops[last] - position, 0), 0)
                if len(marks)
                else np.zeros_like(position)
            )
            return (lengths[which] - over).astype(np.int64)

        of_chunks = before(layout.stops) - before(layout.starts)
        return np.bincount(layout.owners, of_chunks, layout.ranks).astype(np.int64)


def work_of_chunks(mask: Mask, seq_len: int, size: int) -> Ints:
    """Return the estimated number of query-key pairs in each chunk of rows, int64 ``[chunks]``.

    This is the work by which the balanced layout distributes chunks.
    """
    starts = np.arange(0, seq_len, size)
    groups = _RowBlocks.of(mask, starts, np.minimum(starts + size, seq_len))
    return (np.bincount(groups.chunk, groups.pairs, len(starts)) / groups.items).astype(np.int64)


class _RowBlocks(NamedTuple):
    """Blocks of query rows, with the bounds of the keys that they see.

    Attributes:
        chunk: int64 ``[blocks]``, the chunk that each block belongs to.
        starts, stops: int64 ``[blocks, slots]``, the ranges of keys that at least one row of the block sees.
        pairs: float ``[blocks]``, the estimated number of pairs over all batch items that the mask distinguishes.
        items: number of batch items that the mask distinguishes.
    """

    chunk: Ints
    starts: Ints
    stops: Ints
    pairs: np.ndarray
    items: int

    @classmethod
    def of(cls, mask: Mask, starts: Ints, stops: Ints) -> _RowBlocks:
        """Split chunks into blocks of rows, and compute the mask's bounds for each block."""
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
        keys = KeyDomain(np.zeros_like(first), np.full_like(first, length))
        bounds = mask.bounds(Groups(batch, first, last), keys)
        pairs = (last - first + 1) * (bounds.any_row.sizes() + bounds.all_rows.sizes()) / 2
        return cls(chunk, bounds.any_row.starts, bounds.any_row.ends, pairs, items)


def _join_adjacent(ranks: Ints, starts: Ints, stops: Ints, length: int) -> tuple[Ints, Ints, Ints]:
    """Return the key ranges of each rank, sorted, with adjacent ranges joined and empty ranges removed."""
    nonempty = starts < stops
    width = length + 2  # so that ranges of one rank never touch those of the next
    low, high = (ranks[nonempty] * width + edge[nonempty] for edge in (starts, stops))
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
