"""Random: a mask with a few random blocks of keys for each block of queries."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from saccade.masks.mask import Mask
from saccade.masks.mask_fields import SIZE_BITS, check_field
from saccade.plan import Box, Groups
from saccade.plan.key_ranges import Bounds, Ints, KeyDomain, Spans, sort_rows

DRAW_BITS = 12  # each random block is compared with all earlier ones; with more, a row would take minutes
SEED_BITS = 63  # exported programs store the seed as int64
_LOW_32_BITS = 0xFFFFFFFF
_MAX_ROWS = 64  # with more blocks of queries in a group, nearly all keys are visible


@dataclasses.dataclass(frozen=True)
class Random(Mask):
    """A mask of random blocks: each block of queries sees ``blocks_per_row`` random blocks of keys.

    Block i samples distinct blocks from the first ``2 * max(i + 1, blocks_per_row)``, so that half of the candidates
    are before it and half after. The result depends only on the seed and on i: it is the same in training and
    evaluation and for every number of keys (blocks beyond the last key have no effect). Sampling does not change the
    random state of the process.

    >>> print(Random(1, 2, seed=3).picture(8))
    1 1 . . . . . .
    1 1 . . . . . .
    . . . . . . 1 1
    . . . . . . 1 1
    . . . . . . . .
    . . . . . . . .
    1 1 . . . . . .
    1 1 . . . . . .

    Args:
        blocks_per_row: number of key blocks for each block of queries, an int of at least 1; the time for sampling
            grows with its square.
        block_size: number of positions in a block, an int of at least 1.
        seed: seed of the random numbers.

    Raises:
        ValueError: an argument does not meet the conditions above.

    Reference: Zaheer et al. 2020, arXiv:2007.14062, section 2 and appendix D. There, blocks are sampled again for every
    length (in a widespread implementation, only in training).
    """

    blocks_per_row: int
    block_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        check_field(self, "blocks_per_row", 1, bits=DRAW_BITS)
        check_field(self, "block_size", 1, bits=SIZE_BITS)
        check_field(self, "seed", 0, bits=SEED_BITS)

    def drawn(self, rows: Ints) -> Ints:
        """Return the random key blocks of query blocks ``rows``, int64 ``[rows, blocks_per_row]``, sorted by row."""
        drawn = np.stack(list(self._draws(np.asarray(rows, dtype=np.int64)))).T
        sort_rows(drawn)
        return drawn

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        row, column = (x.div(self.block_size, rounding_mode="floor") for x in (q, kv))
        allowed = column != column
        for drawn in self._draws(row):
            allowed = allowed | (drawn == column)
        return allowed & (row >= 0)

    def _draws(self, row: Any) -> Iterator[Any]:
        """Yield random key blocks for an array or tensor of rows, one block for every row at a time.

        This is Floyd's sampling without replacement: each sample has one candidate more than the previous sample. If it
        repeats an earlier block, the last candidate is used instead.
        """
        draws = self.blocks_per_row
        before: list[Any] = []
        candidates = 2 * (row + 1 + (draws - row - 1) * (row + 1 < draws))
        for number in range(draws):
            most = candidates - draws + number
            pick = _random_bits(self.seed, row, number) % (most + 1)
            for other in before:
                pick = pick + (most - pick) * (other == pick)
            before.append(pick)
            yield pick

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        size = self.block_size
        low, high = (np.floor_divide(edge, size) for edge in (groups.first, groups.last))
        most = int((high - low).max(initial=0)) + 1
        if most > _MAX_ROWS:
            return Bounds.unknown(keys)
        starts, ends = [], []
        for offset in range(most):
            row = low + offset
            present = (row <= high) & (row >= 0)
            starts.append(self.drawn(np.maximum(row, 0)) * size)
            ends.append(starts[-1] + np.where(present, size, 0)[:, None])
        any_row = Spans.of(np.concatenate(starts, axis=1), np.concatenate(ends, axis=1), keys)
        return Bounds.exactly(any_row).where((low == high) & (low >= 0), Bounds(any_row, Spans.nothing(keys)))

    def partial(self, box: Box) -> bool | Hashable:
        size = self.block_size
        columns = range(box.keys[0] // size, box.keys[-1] // size + 1)
        drawn = _drawn_once(self, max(box.rows[0] // size, 0), box.rows[-1] // size + 1)
        hits = (drawn >= columns[0]) & (drawn <= columns[-1])
        if not hits.any():
            return False
        if box.rows[0] >= 0 and (hits.sum(axis=1) == len(columns)).all():
            return True
        return (self, box.rows, box.keys)

    def cuts(self, batch: int, rows: range) -> Ints:
        return np.arange(max(rows.start, 0) // self.block_size * self.block_size, rows.stop, self.block_size)


@lru_cache(maxsize=64)
def _drawn_once(rule: Random, first: int, stop: int) -> Ints:
    """Return the random key blocks of consecutive query blocks, cached because a tile needs them repeatedly."""
    return rule.drawn(np.arange(first, stop))


def _random_bits(seed: int, row: Any, number: int) -> Any:
    """Return 32 random bits for each row of an array or tensor, computed by Murmur3's finaliser."""
    x = (row & _LOW_32_BITS) ^ (seed * 0x9E3779B1 + number * 0x85EBCA77 + 0x27D4EB2F) & _LOW_32_BITS
    for _ in range(2):
        x = x ^ (x >> 16)
        x = (x * 0x85EBCA6B) & _LOW_32_BITS
        x = x ^ (x >> 13)
        x = (x * 0xC2B2AE35) & _LOW_32_BITS
        x = (x ^ (x >> 16)) ^ (number + 1)
    return x & _LOW_32_BITS
