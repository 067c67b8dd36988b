"""The blocks of a random mask never change between versions, as models trained with them require."""

import numpy as np
import pytest

from saccade import masks


def _word(seed: int, row: int, number: int) -> int:
    """Apply two rounds of Murmur3's 32-bit finaliser (Appleby, MurmurHash3.cpp), with Python ints."""
    x = row % 2**32 ^ (seed * 0x9E3779B1 + number * 0x85EBCA77 + 0x27D4EB2F) % 2**32
    for _ in range(2):
        x ^= x >> 16
        x = x * 0x85EBCA6B % 2**32
        x ^= x >> 13
        x = x * 0xC2B2AE35 % 2**32
        x ^= x >> 16
        x ^= number + 1
    return x


def _drawn(mask: masks.Random, row: int) -> list[int]:
    """Draw without repetition by Floyd's algorithm, with a set."""
    count = mask.blocks_per_row
    among, found = 2 * max(row + 1, count), set[int]()
    for number in range(count):
        most = among - count + number
        pick = _word(mask.seed, row, number) % (most + 1)
        found.add(most if pick in found else pick)
    return sorted(found)


@pytest.mark.parametrize("seed", [0, 1, 7, 2**31 + 3, 2**63 - 1])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_the_draw_is_the_one_that_is_written_down(count: int, seed: int) -> None:
    mask = masks.Random(count, 2, seed=seed)
    rows = [*range(40), 10**6, 2**32 + 5, 2**35 + 1]
    assert mask.drawn(np.asarray(rows)).tolist() == [_drawn(mask, row) for row in rows]
