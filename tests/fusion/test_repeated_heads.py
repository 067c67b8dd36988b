"""Heads of keys and values that a model repeats are passed once to the attention call."""

import pytest
import torch
from tests.fusion.agreement import assert_agrees

from saccade.fusion import ObserveAttention

B, HEADS, KV, N, D = 2, 6, 2, 5, 4
COUNT = HEADS // KV


def _expanded(x):
    return x[:, :, None].expand(B, KV, COUNT, N, D).reshape(B, HEADS, N, D)


REPEATS = {
    "function": lambda x: torch.repeat_interleave(x, COUNT, dim=1),
    "method": lambda x: x.repeat_interleave(COUNT, 1),
    "named": lambda x: x.repeat_interleave(repeats=COUNT, dim=1),
    "expanded": _expanded,
    "flattened": lambda x: x.unsqueeze(2).expand(-1, -1, COUNT, -1, -1).flatten(1, 2),
    "cast": lambda x: _expanded(x).contiguous().type_as(x),
    "transposed": lambda x: x.transpose(1, 2).repeat_interleave(COUNT, dim=2).transpose(1, 2),
}


@pytest.fixture
def qkv():
    return [torch.randn(B, heads, N, D, requires_grad=True) for heads in (HEADS, KV, KV)]


@pytest.mark.parametrize("repeat", REPEATS.values(), ids=REPEATS)
def test_repeated_once(qkv, repeat):
    q, k, v = qkv
    result = assert_agrees(lambda: (q @ repeat(k).transpose(2, 3)).softmax(-1) @ repeat(v), qkv, calls=1)
    (call,) = result.calls
    assert [x.shape[1] for x in (call.query, call.key, call.value)] == [HEADS, KV, KV]
    assert torch.equal(call.key, k)


def test_observed(qkv):
    q, k, v = qkv
    calls = []
    with torch.no_grad(), ObserveAttention(calls.append):
        (q @ _expanded(k).mT).softmax(-1) @ _expanded(v)
    assert torch.equal(calls[0].key, k)
    torch.testing.assert_close(calls[0].matrix().to_dense(), (q @ _expanded(k).mT).softmax(-1))


def _unequally(q, k, v):
    counts = torch.tensor([1, 5])
    return (q @ k.repeat_interleave(counts, dim=1).mT).softmax(-1) @ v.repeat_interleave(counts, dim=1)


def _positions(q, k, v):
    k, v = (x.repeat(1, COUNT, 1, 1).repeat_interleave(2, dim=2) for x in (k, v))
    return (q @ k.mT).softmax(-1) @ v


def _one_position(q, k, v):
    k, v = (x.repeat(1, COUNT, 1, 1)[:, :, :1].repeat_interleave(N, dim=2) for x in (k, v))
    return (q @ k.mT).softmax(-1) @ v


def _biased(q, k, v):
    q, k, v = q.flatten(0, 1), _expanded(k).flatten(0, 1), _expanded(v).flatten(0, 1)
    return torch.baddbmm(torch.ones(1, N, N).tril(), q, k.mT).softmax(-1) @ v


OTHERS = {
    "keys alone": (lambda q, k, v: (q @ _expanded(k).mT).softmax(-1) @ v.repeat(1, COUNT, 1, 1), HEADS),
    "values alone": (lambda q, k, v: (q @ k.repeat(1, COUNT, 1, 1).mT).softmax(-1) @ _expanded(v), HEADS),
    "tiled": (lambda q, k, v: (q @ k.repeat(1, COUNT, 1, 1).mT).softmax(-1) @ v.repeat(1, COUNT, 1, 1), HEADS),
    "unequally": (_unequally, HEADS),
    "written to": (lambda q, k, v: (q @ _expanded(k).add_(torch.arange(D)).mT).softmax(-1) @ _expanded(v), HEADS),
    "both": (lambda q, k, v: (_expanded(k) @ _expanded(v).mT).softmax(-1) @ _expanded(v), HEADS),
    "positions": (_positions, HEADS),
    "one position": (_one_position, HEADS),
    "keys first": (lambda q, k, v: (_expanded(k) @ q.mT).softmax(2).mT @ _expanded(v), KV),
    "biased": (_biased, 1),
}


@pytest.mark.parametrize(("attend", "kv_heads"), OTHERS.values(), ids=OTHERS)
def test_others(qkv, attend, kv_heads):
    result = assert_agrees(lambda: attend(*qkv), qkv, calls=1)
    assert result.calls[0].key.shape[1] == kv_heads
