"""The strongest of a row: the largest, and of equal ones those that stand first."""

import math

import pytest
import torch

from saccade.engine.block_sparse.selection import stable_topk

ROWS = torch.tensor(
    [
        [1.0, 3.0, 2.0, 3.0, 3.0, 0.0],
        [2.0, 2.0, 2.0, 2.0, 2.0, 2.0],
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
        [-math.inf, 1.0, -math.inf, 1.0, -math.inf, -math.inf],
        [math.inf, 4.0, 4.0, math.inf, 4.0, 1.0],
        [1.0, math.nan, 1.0, 1.0, 2.0, 1.0],
        [math.inf, math.nan, 1.0, math.inf, math.nan, math.inf],
    ]
)


@pytest.mark.parametrize("k", range(7))
@pytest.mark.parametrize("length", [6, 200])
def test_they_are_the_first_of_a_stable_order(k: int, length: int) -> None:
    rows = torch.cat([ROWS, torch.full((len(ROWS), length - 6), -1.0)], 1)[None]
    for row, found in zip(rows[0].tolist(), stable_topk(rows, k)[0].tolist(), strict=True):
        largest = sorted(range(length), key=lambda i: (0.0, i) if math.isnan(row[i]) else (1.0, -row[i], i))[:k]
        if any(row[i] == -math.inf for i in largest):  # of pairs that are hidden any may be taken
            assert sorted(row[i] for i in found) == sorted(row[i] for i in largest)
        elif k == 1 and math.isnan(row[4]):  # and of NaN, too
            assert math.isnan(row[found[0]])
        else:
            assert sorted(found) == sorted(largest)
