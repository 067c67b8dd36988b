"""Attention written by hand in thousands of ways: outputs and gradients are the same when it is fused."""

import math

import pytest
import torch
from tests.fusion.agreement import run
from tests.fusion.random_attention import random_attention

from saccade.fusion import FuseAttention, ObserveAttention


def errors(seed):
    """The largest errors with and without fusion, against the same in float64, and what was fused.

    With each pair of errors comes the root of the number of scores that an entry sums: its rounding grows with it.
    """
    attend, tensors, choices = random_attention(seed)
    exact = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    expected = run(lambda: attend(exact), list(exact.values()), fused=False)
    results = [run(lambda: attend(tensors), list(tensors.values()), fused=fused) for fused in (False, True)]
    plain, fused = results
    assert (fused.out.dtype, fused.out.shape) == (plain.out.dtype, plain.out.shape), choices
    worst = []
    size = max(x.abs().max() for x in expected.grads)
    scores = choices["batch"] * choices["heads"] * choices["n"] * choices["m"]
    for index, right in enumerate((expected.out, *expected.grads)):
        scale = right.abs().max() if index == 0 else size
        pair = [((one.out, *one.grads)[index].double() - right).abs().max() / scale for one in results]
        summed = scores / right.numel() if index else 1.0
        worst.append((*torch.stack(pair).tolist(), math.sqrt(summed)))
    return worst, len(fused.calls), choices


def check(seeds):
    fused = 0
    for seed in seeds:
        found, calls, choices = errors(seed)
        eps = torch.finfo(choices["dtype"]).eps
        for plain, ours, root in found:
            assert ours <= 3 * plain + 8 * max(4.0, root) * eps, (seed, plain, ours, choices)
        is_capped_after_bias = choices.get("product") == "biased" and choices["softcap"] in ("function", "method")
        assert calls == (not is_capped_after_bias), (seed, choices)
        fused += calls
    return fused


def test_a_hundred():
    assert check(range(100)) >= 80


def test_observed_as_it_is_fused():
    for seed in range(100):
        attend, tensors, choices = random_attention(seed)
        fused, observed = [], []
        with torch.no_grad():
            expected = attend(tensors)
            with FuseAttention(on_attention=fused.append):
                attend(tensors)
            with ObserveAttention(observed.append):
                assert torch.equal(attend(tensors), expected), choices
        assert len(observed) == len(fused), choices
        for ours, theirs in zip(observed, fused, strict=True):
            torch.testing.assert_close(ours.matrix().to_dense(), theirs.matrix().to_dense(), msg=str(choices))
            assert torch.equal(ours.value, theirs.value), choices


@pytest.mark.slow
def test_two_thousand():
    assert check(range(2000)) >= 1900
