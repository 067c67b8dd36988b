"""Layout: the assignment of a sequence's tokens to ranks."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from saccade.plan.key_ranges import Ints

NAMES = ("contiguous", "zigzag", "striped", "balanced")
_STRIPE = 128  # tokens in a stripe
_PARTS = 16  # chunks per rank in a balanced layout


class ContiguousRun(NamedTuple):
    """A run of consecutive tokens on a rank, and the ranks that store the tokens before and after it.

    Attributes:
        rows: indices of the tokens among the local rows.
        tokens: positions of the tokens.
        before, after: ranks of the adjacent tokens; None at the ends of the sequence.
    """

    rows: slice
    tokens: range
    before: int | None
    after: int | None


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The layout of a sequence across ranks: chunks of tokens and their owners, in order.

    Attributes:
        name: one of `NAMES`.
        ranks: number of ranks.
        starts, stops: int64 ``[chunks]``, the bounds of the chunks, which cover each token once.
        owners: int64 ``[chunks]``, the rank that stores each chunk.
    """

    name: str
    ranks: int
    starts: Ints
    stops: Ints
    owners: Ints

    @property
    def seq_len(self) -> int:
        """Number of tokens in the full sequence."""
        return int(self.stops[-1]) if len(self.stops) else 0

    @cached_property
    def counts(self) -> Ints:
        """Number of tokens of each rank, int64 ``[ranks]``."""
        return np.bincount(self.owners, self.stops - self.starts, self.ranks).astype(np.int64)

    def rows(self, rank: int) -> tuple[range, ...]:
        """Return the token ranges of a rank, in order, with adjacent ranges joined."""
        local = self.owners == rank
        ranges: list[range] = []
        for start, stop in zip(self.starts[local].tolist(), self.stops[local].tolist(), strict=True):
            if ranges and ranges[-1].stop == start:
                ranges[-1] = range(ranges[-1].start, stop)
            elif start < stop:
                ranges.append(range(start, stop))
        return tuple(ranges)

    def runs_of(self, rank: int) -> tuple[ContiguousRun, ...]:
        """Return the runs of consecutive tokens on a rank, in order."""
        owners = [None, *(owner for owner, _ in self._runs), None]
        runs, start = [], 0
        for number, (owner, tokens) in enumerate(self._runs):
            if owner == rank:
                stop = start + len(tokens)
                runs.append(ContiguousRun(slice(start, stop), tokens, owners[number], owners[number + 2]))
                start = stop
        return tuple(runs)

    @cached_property
    def _runs(self) -> list[tuple[int, range]]:
        """The layout's runs (owner, tokens) in order; adjacent chunks with the same owner form one run."""
        runs: list[tuple[int, range]] = []
        for start, stop, owner in zip(self.starts.tolist(), self.stops.tolist(), self.owners.tolist(), strict=True):
            follows = runs and runs[-1][0] == owner
            runs.append((owner, range(runs.pop()[1].start if follows else start, stop)))
        return runs

    @cached_property
    def fingerprint(self) -> str:
        """A digest that is equal for equal layouts."""
        digest = hashlib.sha256(f"{self.name} {self.ranks}".encode())
        for array in (self.starts, self.stops, self.owners):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def tokens(self, rank: int) -> Ints:
        """Return the positions of a rank's tokens, in order, int64."""
        return positions_in(self.rows(rank))


@lru_cache(maxsize=64)
def layout_of(name: str, seq_len: int, ranks: int) -> Layout:
    """Return the layout with the given name; it does not depend on the mask.

    Args:
        name: "contiguous" (one run of tokens per rank), "zigzag" (two runs, one from each end, which balances a causal
            mask) or "striped" (runs of 128 tokens, assigned to the ranks in turn).
        seq_len: number of tokens; if not divisible by ``ranks``, the last ranks store fewer tokens, or none.
        ranks: number of ranks.
    """
    if name == "contiguous":
        return _in_turn(name, seq_len, ranks, -(-seq_len // ranks))
    if name == "zigzag":
        size = -(-seq_len // (2 * ranks))
        order = np.concatenate([np.arange(ranks), np.arange(ranks)[::-1]])
        return _chunked(name, seq_len, ranks, size, order)
    return _in_turn(name, seq_len, ranks, _STRIPE)


def balanced(seq_len: int, ranks: int, work: Ints) -> Layout:
    """Return a layout with balanced work, in which each rank has the same number of equal chunks.

    Chunks are assigned in order of decreasing work: each goes to the rank with the least work so far, among the ranks
    that do not yet have all their chunks.

    Args:
        seq_len, ranks: as for `layout_of`.
        work: int64, the work of each of the ``16 * ranks`` chunks.
    """
    size, room = chunk_size(seq_len, ranks), np.full(ranks, _PARTS)
    owners, load = np.zeros(len(work), dtype=np.int64), np.zeros(ranks)
    for chunk in np.argsort(-work, kind="stable"):
        rank = int(np.where(room > 0, load, np.inf).argmin())
        owners[chunk], load[rank], room[rank] = rank, load[rank] + work[chunk], room[rank] - 1
    return _chunked("balanced", seq_len, ranks, size, owners)


def chunk_size(seq_len: int, ranks: int) -> int:
    """Return the number of tokens in each chunk of a balanced layout."""
    return max(1, -(-seq_len // (_PARTS * ranks)))


def positions_in(ranges: Sequence[range]) -> Ints:
    """Concatenate ranges of token positions into one int64 array."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *(np.arange(span.start, span.stop) for span in ranges)])


def _in_turn(name: str, seq_len: int, ranks: int, size: int) -> Layout:
    return _chunked(name, seq_len, ranks, size, np.arange(-(-seq_len // max(size, 1))) % ranks)


def _chunked(name: str, seq_len: int, ranks: int, size: int, owners: Ints) -> Layout:
    starts = np.minimum(np.arange(len(owners), dtype=np.int64) * size, seq_len)
    stops = np.minimum(starts + size, seq_len)
    nonempty = starts < stops
    return Layout(name, ranks, starts[nonempty], stops[nonempty], owners[nonempty].astype(np.int64))
