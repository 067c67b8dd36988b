"""The standard pattern of a mask equals the mask, and packed sequences are described as kernels need them."""

import pytest
import torch

from saccade import masks
from saccade.masks import Causal, Documents, Full, Mask, Padding, Prefix, Window
from saccade.masks.convert.patterns import describe, packed_of, window_sides, window_size
from saccade.testing import CASES

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
    (masks.Documents([3, 4]) & masks.Causal(), 7, None, 0),
    (masks.Documents([3, 4], rule=masks.Window(3, 1)) & masks.Window(2, 5), 7, 2, 1),
    (masks.Window(1, 1) | masks.Causal(), 7, None, 1),
    (masks.Documents([3, 4], rule=masks.Window(1, 0) | masks.Window(0, 2)), 7, 1, 2),
]


@pytest.mark.parametrize("mask, length, left, right", PACKED, ids=str)
def test_what_is_packed_is_the_rule(mask: masks.Mask, length: int, left: int | None, right: int | None) -> None:
    found = packed_of(mask, length)
    assert found is not None
    assert (found.left, found.right) == (left, right)
    assert all(size for item in found.lengths for size in item)
    again = masks.Documents(found.lengths, rule=masks.Window(found.left, found.right))
    assert torch.equal(again.to_dense(length, batch=2), mask.to_dense(length, batch=2))


OTHERS = [
    masks.Documents([3, 5]),
    masks.Documents([[3, 4], [8]]),
    masks.Documents([3, 4], rule=masks.Strided(2)),
    masks.Documents([3, 4], rule=masks.Causal() & masks.Strided(2)),
    ~masks.Causal(),
]


@pytest.mark.parametrize("mask", OTHERS, ids=str)
def test_anything_else_is_not_packed(mask: masks.Mask) -> None:
    assert packed_of(mask, 7) is None


DESCRIBED = [
    (Full() & Full(), Full()),
    (Window(None, None), Full()),
    (Window(None, 0), Causal()),
    (Causal() & Window(4, 2), Window(4, 0)),
    (Window(4, 0) | Causal(), Causal()),
    (Padding([3, 5]) & Full(), Padding([3, 5])),
    (Prefix(3), Prefix(3)),
    (Documents([2, 3], rule=Full()), Documents([2, 3])),
    (Documents([2, 3]) & Causal() & Full(), Documents([2, 3], rule=Causal())),
    (Documents([2, 3]) & Documents([2, 3]), None),
    (Padding([3]) & Causal(), None),
    (Prefix(3) | Causal(), None),
    (Documents([2, 3]) | Causal(), None),
    (~Causal(), None),
    (masks.Strided(2), None),
    (Causal().after(1), None),
]


@pytest.mark.parametrize("mask, pattern", DESCRIBED, ids=str)
def test_the_pattern_of_a_mask(mask: Mask, pattern: Mask | None) -> None:
    assert describe(mask) == pattern


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.mask is not None and describe(case.mask) is not None], ids=str
)
def test_the_pattern_allows_the_same_pairs(case) -> None:
    n, (batch, heads) = case.kv_len, case.mask.shape
    pattern = describe(case.mask)
    assert torch.equal(pattern.to_dense(n, batch=batch, heads=heads), case.mask.to_dense(n, batch=batch, heads=heads))


def test_sizes_of_windows() -> None:
    assert window_size(masks.sliding_window(5)) == window_size(Causal() & Window(4, 9)) == 5
    assert [window_size(mask) for mask in (Causal(), Window(3, 1), Prefix(2), Full())] == [None] * 4
    assert window_sides(Full()) == (float("inf"), float("inf"))
    assert window_sides(Documents([3])) is None
