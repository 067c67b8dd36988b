"""Texts that stand one behind another and are seen through a window, as kernels for packed texts want to be told."""

import pytest
import torch

from saccade import masks
from saccade.masks.convert.varlen import packed_of

PACKED = [
    (masks.Documents([3, 4]), 7, None, None),
    (masks.Documents([3, 0, 4], rule=masks.Full()), 7, None, None),
    (masks.Documents([3, 4], rule=masks.Causal()), 7, None, 0),
    (masks.Documents([[3, 4], [7]], rule=masks.Window(2, 1)), 7, 2, 1),
    (masks.Documents([3, 4], rule=masks.Causal() & masks.Window(2, 0)), 7, 2, 0),
    (masks.Documents([3, 4], rule=masks.Window(2, None) & masks.Window(3, 4) & masks.Window(None, 5)), 7, 2, 4),
    (masks.Documents([3, 2]), 7, None, None),
    (masks.Causal(), 7, None, 0),
    (masks.Window(2, 3), 7, 2, 3),
    (masks.Full(), 5, None, None),
    (masks.Causal() & masks.Window(None, 2), 7, None, 0),
    (masks.Full() & masks.Window(3, None), 7, 3, None),
]


@pytest.mark.parametrize("mask, length, left, right", PACKED, ids=str)
def test_packed_ranges_equal_the_rule(mask: masks.Mask, length: int, left: int | None, right: int | None) -> None:
    found = packed_of(mask, length)
    assert found is not None
    assert (found.left, found.right) == (left, right)
    assert all(size for item in found.lengths for size in item)
    again = masks.Documents(found.lengths, rule=masks.Window(found.left, found.right))
    assert torch.equal(again.to_dense(length, batch=2), mask.to_dense(length, batch=2))


OTHERS = [
    masks.Documents([3, 4]) & masks.Causal(),
    masks.Documents([3, 5]),
    masks.Documents([[3, 4], [8]]),
    masks.Documents([3, 4], rule=masks.Strided(2)),
    masks.Documents([3, 4], rule=masks.Causal() & masks.Strided(2)),
    masks.Window(1, 1) | masks.Causal(),
    ~masks.Causal(),
]


@pytest.mark.parametrize("mask", OTHERS, ids=str)
def test_anything_else_is_not_packed(mask: masks.Mask) -> None:
    assert packed_of(mask, 7) is None
