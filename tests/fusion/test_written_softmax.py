"""Softmax that a model writes with exponentials and sums."""

import math

import pytest
import torch
from tests.fusion.agreement import assert_agrees
from torch import nn

import saccade as sc
from saccade.fusion import FuseAttention, ObserveAttention
from saccade.support.errors import UnsupportedError

N, D = 6, 4
HIDDEN = torch.ones(N, N).triu(1) > 0
EMPTY_ROW = HIDDEN | (torch.arange(N) == 2)[:, None]


@pytest.fixture
def qkv():
    return [torch.randn(2, 3, N, D, requires_grad=True, dtype=torch.float64) for _ in range(3)]


def scores(qkv):
    return qkv[0] @ qkv[1].mT / math.sqrt(D)


def normalised(e):
    return e / e.sum(-1, keepdim=True)


def stable(s):
    return s - s.max(-1, keepdim=True)[0]


def by_functions(e):
    return torch.div(e, torch.sum(e, dim=(-1,), keepdim=True))


FUSED = {
    "plain": lambda s: normalised(s.exp()),
    "functions": lambda s: by_functions(torch.exp(s)),
    "minus the maximum": lambda s: normalised(stable(s).exp()),
    "minus a number": lambda s: normalised((s - 3.0).exp()),
    "masked": lambda s: normalised(s.masked_fill(HIDDEN, -1e9).exp()),
    "masked, minus the maximum": lambda s: normalised(stable(s.masked_fill(HIDDEN, -1e9)).exp()),
    "infinity": lambda s: normalised(s.masked_fill(HIDDEN, -math.inf).exp()),
    "times a mask": lambda s: normalised(s.exp() * ~HIDDEN),
    "filled with 0": lambda s: normalised(s.exp().masked_fill(HIDDEN, 0.0)),
    "a bias": lambda s: normalised((s + torch.linspace(-1, 1, N).double()).exp()),
    "logarithms": lambda s: s.log_softmax(-1).exp(),
    "logarithms by the function": lambda s: torch.exp(nn.functional.log_softmax(s, dim=-1)),
    "logarithms by the module": lambda s: nn.LogSoftmax(-1)(s).exp(),
    "minus the logarithm of the sum": lambda s: (s - torch.logsumexp(s, -1, keepdim=True)).exp(),
    "all masked, minus the maximum": lambda s: normalised(stable(s.masked_fill(EMPTY_ROW, -1e9)).exp()),
}
NOT_FUSED = {
    "all masked": lambda s: normalised(s.masked_fill(EMPTY_ROW, -1e9).exp()),
    "sum of columns": lambda s: s.exp() / s.exp().sum(-2, keepdim=True),
    "sum of other exponentials": lambda s: s.exp() / (2 * s).exp().sum(-1, keepdim=True),
    "sum without a mask": lambda s: s.exp() * ~HIDDEN / s.exp().sum(-1, keepdim=True),
    "sum and a number": lambda s: s.exp() / (s.exp().sum(-1, keepdim=True) + 1.0),
    "dropped out before the sum": lambda s: normalised(nn.functional.dropout(s.exp(), 0.0)),
    "squared": lambda s: normalised(s.exp().square()),
    "a power of two": lambda s: normalised(s.exp2()),
    "minus another logarithm": lambda s: (s - torch.logsumexp(2 * s, -1, keepdim=True)).exp(),
    "logarithms of columns": lambda s: s.log_softmax(-2).exp(),
    "no exponential": lambda s: s.log_softmax(-1),
}


@pytest.mark.parametrize("weights", FUSED.values(), ids=FUSED)
def test_fused(qkv, weights):
    assert_agrees(lambda: weights(scores(qkv)) @ qkv[2], qkv, calls=1)


@pytest.mark.parametrize("weights", NOT_FUSED.values(), ids=NOT_FUSED)
def test_other_results_are_the_models_own(qkv, weights):
    assert_agrees(lambda: weights(scores(qkv)) @ qkv[2], qkv, calls=0)


@pytest.mark.parametrize("weights", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_recorded(qkv, weights, dtype):
    calls, others = [], []
    with (
        torch.no_grad(),
        torch.autocast("cpu", enabled=dtype == torch.bfloat16),
        ObserveAttention(calls.append, on_weights=others.append),
    ):
        w = weights(scores([x.float() if dtype == torch.bfloat16 else x for x in qkv]).double())
        w @ qkv[2].to(w.dtype)
    found = calls[0].matrix().to_dense() if calls else others[0]
    assert len(calls) + len(others) == 1
    torch.testing.assert_close(found.to(w), w, atol=1e-6 if dtype == torch.float64 else 2e-2, rtol=0.0)


def test_weights_that_are_no_product_of_queries_and_keys():
    found, x = [], torch.randn(2, N, N)
    with ObserveAttention(lambda call: None, on_weights=found.append):
        e = x.tanh().exp()
        w = e / e.sum(dim=-1, keepdim=True)
        w @ torch.randn(2, N, D)
    assert torch.equal(found[0][:, 0], w)


def test_exponentials_that_are_written_to():
    found, x = [], torch.randn(2, N, N)
    with ObserveAttention(lambda call: None, on_weights=found.append):
        e = x.tanh().exp()
        total = e.sum(dim=-1, keepdim=True)
        e.mul_(2)
        (e / total) @ torch.randn(2, N, D)
    assert not found


def late(q, k, v):
    e = (q @ k.mT).exp()
    return e @ v / e.sum(-1, keepdim=True)


def chunked(q, k, v):
    parts = []
    for i in (0, 3):
        s = torch.einsum("...qd,...kd->...qk", q, k[..., i : i + 3, :])
        e = torch.exp(s - torch.max(s, dim=-1, keepdim=True)[0].detach())
        parts.append(torch.einsum("...kf,...qk->...qf", v[..., i : i + 3, :], e))
    return sum(parts)


@pytest.mark.parametrize("attend", [late, chunked])
def test_exponentials_that_multiply_values_before_they_are_normalised_are_noted(qkv, attend):
    noted = []
    assert_agrees(lambda: attend(*qkv), qkv, calls=0)
    with FuseAttention(on_weights=noted.append, on_unknown=lambda: noted.append(None)):
        attend(*qkv)
    assert set(noted) == {None}


class Mixed(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, x):
        return self.attend(x, x, x)


def test_such_a_module_is_reported_and_refused():
    model = nn.Sequential(Mixed(lambda q, k, v: (q @ k.mT).softmax(-1) @ v), Mixed(late))
    x = torch.randn(2, 3, N, D)
    with pytest.warns(sc.recording.UnrecordedLayersWarning), sc.record(model) as recording:
        model(x)
    assert recording.layers == ("0",)
    assert "1" in recording.not_recorded
    sc.replace_attention(model)
    with pytest.raises(UnsupportedError, match=r"1 \(Mixed\)"):
        model(x)
