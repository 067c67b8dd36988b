"""Masks of keys and queries exchanged."""

import pytest
import torch

from saccade import masks
from saccade.masks.transposition import transposed
from saccade.testing import CASES


def _knows(mask):
    return mask is None or transposed(mask) is not None


KNOWN = [case for case in CASES if case.q_positions is None and _knows(case.mask)]


@pytest.mark.parametrize("case", KNOWN, ids=str)
def test_pairs_are_exchanged(case):
    mask = masks.Full() if case.mask is None else case.mask
    found, n = transposed(mask), case.kv_len
    want = mask.to_dense(n, batch=mask.shape[0], heads=mask.shape[1]).transpose(-1, -2)
    assert torch.equal(found.to_dense(n, batch=mask.shape[0], heads=mask.shape[1]), want)


def test_known_transposes():
    rule = masks.Causal() & masks.Window(4, 1) | masks.Global([3], seen=False) | ~masks.Strided(2)
    want = masks.Window(0, None) & masks.Window(1, 4) | masks.Global([3], sees=False) | ~masks.Strided(2)
    assert transposed(rule) == want
    documents = masks.Documents([4, 2], rule=masks.Causal())
    assert transposed(documents) == masks.Documents([4, 2], rule=masks.Window(0, None))
    assert transposed(masks.Documents([4, 2])) == masks.Documents([4, 2])
    assert transposed(masks.Padding([3])) is None
    assert transposed(masks.Causal() & masks.Padding([3])) is None
    assert transposed(masks.Documents([4, 2], rule=masks.Random(1, 2, 0))) is None
    assert transposed(~masks.Random(1, 2, 0)) is None
