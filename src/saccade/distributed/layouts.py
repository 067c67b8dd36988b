"""Layout: which rank holds which tokens of a sequence."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from saccade.plan.key_ranges import Ints

__all__ = ["NAMES", "Layout", "Turn", "balanced", "chunk_size", "layout_of", "numbers"]

NAMES = ("contiguous", "zigzag", "striped", "balanced")
_STRIPE = 128  # tokens of a stripe
_PARTS = 16  # chunks of each rank, of which a balanced layout is put together


class Turn(NamedTuple):
    """Tokens of this rank that follow one another, and who holds those before and behind them.

    Attributes:
        rows: their places among the own rows.
        tokens: their positions.
        before, behind: ranks; None at the ends of the sequence.
    """

    rows: slice
    tokens: range
    before: int | None
    behind: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Chunks of a sequence and who holds each, in order.

    Attributes:
        name: one of `NAMES`.
        ranks: how many there are.
        starts, stops: int64 ``[chunks]``; the chunks cover the sequence, each token once.
        owners: int64 ``[chunks]``.
    """

    name: str
    ranks: int
    starts: Ints
    stops: Ints
    owners: Ints

    @property
    def seq_len(self) -> int:
        """Tokens of the whole sequence."""
        return int(self.stops[-1]) if len(self.stops) else 0

    @cached_property
    def counts(self) -> Ints:
        """Tokens of each rank, int64 ``[ranks]``."""
        return np.bincount(self.owners, self.stops - self.starts, self.ranks).astype(np.int64)

    def rows(self, rank: int) -> tuple[range, ...]:
        """The tokens of a rank, in order, as few ranges as can be."""
        own = self.owners == rank
        found: list[range] = []
        for start, stop in zip(self.starts[own].tolist(), self.stops[own].tolist(), strict=True):
            if found and found[-1].stop == start:
                found[-1] = range(found[-1].start, stop)
            elif start < stop:
                found.append(range(start, stop))
        return tuple(found)

    def turns_of(self, rank: int) -> tuple[Turn, ...]:
        """The turns of a rank, in order."""
        holders = [None, *(holder for holder, _ in self._held), None]
        found, start = [], 0
        for number, (holder, tokens) in enumerate(self._held):
            if holder == rank:
                stop = start + len(tokens)
                found.append(Turn(slice(start, stop), tokens, holders[number], holders[number + 2]))
                start = stop
        return tuple(found)

    @cached_property
    def _held(self) -> list[tuple[int, range]]:
        """(holder, tokens) in the order of the tokens, as few as can be."""
        found: list[tuple[int, range]] = []
        for start, stop, owner in zip(self.starts.tolist(), self.stops.tolist(), self.owners.tolist(), strict=True):
            follows = found and found[-1][0] == owner
            found.append((owner, range(found.pop()[1].start if follows else start, stop)))
        return found

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal layouts."""
        made = hashlib.sha256(f"{self.name} {self.ranks}".encode())
        for edge in (self.starts, self.stops, self.owners):
            made.update(edge.tobytes())
        return made.hexdigest()

    def tokens(self, rank: int) -> Ints:
        """The tokens of a rank, in order, int64."""
        return numbers(self.rows(rank))


@lru_cache(maxsize=64)
def layout_of(name: str, seq_len: int, ranks: int) -> Layout:
    """A layout that asks nothing of the mask.

    Args:
        name: "contiguous" (a run of tokens each), "zigzag" (two runs, one from either end, so that a causal mask costs
            all the same) or "striped" (runs of 128 tokens in turn).
        seq_len: tokens; where ranks do not divide them, the last ranks hold fewer, or none.
        ranks: how many there are.
    """
    if name == "contiguous":
        return _in_turn(name, seq_len, ranks, -(-seq_len // ranks))
    if name == "zigzag":
        size = -(-seq_len // (2 * ranks))
        order = np.concatenate([np.arange(ranks), np.arange(ranks)[::-1]])
        return _chunked(name, seq_len, ranks, size, order)
    return _in_turn(name, seq_len, ranks, _STRIPE)


def balanced(seq_len: int, ranks: int, work: Ints) -> Layout:
    """Chunks of equal size, as many for each rank, chosen so that ranks have equal work.

    The dearest chunk comes first, and each goes to the rank with the least to do that still has room.

    Args:
        seq_len, ranks: as for `layout_of`.
        work: of each of the ``16 * ranks`` chunks, int64.
    """
    size, room = chunk_size(seq_len, ranks), np.full(ranks, _PARTS)
    owners, load = np.zeros(len(work), dtype=np.int64), np.zeros(ranks)
    for chunk in np.argsort(-work, kind="stable"):
        rank = int(np.where(room > 0, load, np.inf).argmin())
        owners[chunk], load[rank], room[rank] = rank, load[rank] + work[chunk], room[rank] - 1
    return _chunked("balanced", seq_len, ranks, size, owners)


def chunk_size(seq_len: int, ranks: int) -> int:
    """Tokens of the chunks that a balanced layout is put together of."""
    return max(1, -(-seq_len // (_PARTS * ranks)))


def numbers(ranges: Sequence[range]) -> Ints:
    """The numbers of ranges, one behind the other, int64."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(span.start, span.stop) for span in ranges)])


def _in_turn(name: str, seq_len: int, ranks: int, size: int) -> Layout:
    return _chunked(name, seq_len, ranks, size, np.arange(-(-seq_len // max(size, 1))) % ranks)


def _chunked(name: str, seq_len: int, ranks: int, size: int, owners: Ints) -> Layout:
    starts = np.minimum(np.arange(len(owners), dtype=np.int64) * size, seq_len)
    stops = np.minimum(starts + size, seq_len)
    kept = starts < stops
    return Layout(name, ranks, starts[kept], stops[kept], owners[kept].astype(np.int64))
