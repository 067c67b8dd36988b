"""Operands and scores that are written to between the product and the softmax."""

import math

import pytest
import torch
from tests.fusion.agreement import assert_agrees
from torch.nn import functional as F

N, D = 6, 4


@pytest.fixture
def qkv():
    return [torch.randn(2, 3, N, D, requires_grad=True) for _ in range(3)]


def scores(qkv):
    return qkv[0] @ qkv[1].mT / math.sqrt(D)


def _causal():
    return torch.ones(N, N).triu(1) > 0


WRITES = {
    "query": lambda q, k, m, b: q.mul_(2.0),
    "key by index": lambda q, k, m, b: k.__setitem__((..., 0), 1.0),
    "key through a view": lambda q, k, m, b: k.mT.zero_(),
    "key through data": lambda q, k, m, b: k.data.add_(1.0),
    "mask": lambda q, k, m, b: m.fill_(True),
    "bias": lambda q, k, m, b: b.add_(torch.randn(N, N)),
    "bias, by out=": lambda q, k, m, b: torch.mul(b, 3.0, out=b),
    "bias, by relu": lambda q, k, m, b: F.relu(b, inplace=True),
    "bias, foreach": lambda q, k, m, b: torch._foreach_add_([b], 1.0),
    "bias, by NumPy": lambda q, k, m, b: b.numpy().fill(7.0),
    "bias, by copy": lambda q, k, m, b: b.copy_(torch.zeros(N, N)),
    "bias, by aten": lambda q, k, m, b: torch.ops.aten.add_(b, 1.0),
    "bias, replaced": lambda q, k, m, b: setattr(b, "data", torch.zeros(N, N)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("when", ["product", "softmax"])
def test_operands_that_are_written_to(write, when):
    def attend():
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 3, N, D) for _ in range(3))
        mask, bias = _causal(), torch.randn(N, N)
        s = (q @ k.mT + bias).masked_fill(mask, -math.inf)
        if when == "product":
            write(q, k, mask, bias)
        weights = s.softmax(-1)
        if when == "softmax":
            write(q, k, mask, bias)
        return weights @ v

    assert_agrees(attend, calls=0)


def test_a_write_to_something_else(qkv):
    def attend():
        s, other = scores(qkv), torch.zeros(3)
        other += 1
        other[0] = 2
        return s.softmax(-1) @ qkv[2]

    assert_agrees(attend, qkv, calls=1)


ALIASES = {
    "view": lambda s: s.view(6, N, N),
    "transposed": lambda s: s.mT,
    "more axes": lambda s: s[:, None],
    "itself": lambda s: s.contiguous(),
    "copy": lambda s: s.clone(),
    "scaled": lambda s: s * 2,
    "cast": lambda s: s.to(torch.float32),
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_scores_that_are_written_to_beside_a_view(qkv, alias):
    def attend():
        s = scores(qkv)
        other = alias(s)
        other.masked_fill_(_causal(), -1e9)
        s.mul_(1.5)
        return s.softmax(-1) @ qkv[2] + other.reshape(2, 3, N, N).softmax(-1) @ qkv[2]

    assert_agrees(attend, qkv)
