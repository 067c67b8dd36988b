"""Scores minus the maximum of their row, which many models write for a stable softmax."""

import math

import pytest
import torch
from tests.fusion.agreement import assert_agrees

from saccade.fusion import FuseAttention

N, D = 6, 4
HIDDEN = torch.ones(N, N).triu(1) > 0


@pytest.fixture
def qkv():
    return [torch.randn(2, 3, N, D, requires_grad=True, dtype=torch.float64) for _ in range(3)]


def scores(qkv):
    return (qkv[0] @ qkv[1].mT / math.sqrt(D)).masked_fill(HIDDEN, -1e9)


def in_place(s):
    s -= s.amax(-1, keepdim=True).detach()
    return s


def unpacked(s):
    largest, _ = s.max(-1, keepdim=True)
    return largest


STABLE = {
    "detached": lambda s: s - s.amax(dim=-1, keepdim=True).detach(),
    "attached": lambda s: s - s.amax(-1, True),
    "function": lambda s: torch.sub(s, torch.amax(s, (-1,), keepdim=True)),
    "in another shape": lambda s: STABLE["detached"](s).view(6, N, N).view(2, 3, N, N),
    "times a number": lambda s: STABLE["detached"](s) * 2,
    "with positions": lambda s: s - s.max(-1, keepdim=True)[0],
    "named": lambda s: s - torch.max(s, dim=-1, keepdim=True).values.detach(),
    "unpacked": lambda s: s - unpacked(s),
    "twice": lambda s: STABLE["detached"](STABLE["attached"](s)),
    "masked again": lambda s: STABLE["detached"](s).masked_fill(HIDDEN, -math.inf),
}


@pytest.mark.parametrize("stable", STABLE.values(), ids=STABLE)
def test_fused(qkv, stable):
    assert_agrees(lambda: stable(scores(qkv)).softmax(-1) @ qkv[2], qkv, calls=1)


def other_scores(s, qkv):
    return s - (qkv[0] @ qkv[2].mT).amax(-1, keepdim=True)


def changed_between(s, qkv):
    largest = s.amax(-1, keepdim=True)
    return s * 2 - largest


NOT_FUSED = {
    "in place": lambda s, qkv: in_place(s),
    "of other scores": other_scores,
    "of scores that changed since": changed_between,
    "of columns": lambda s, qkv: s - s.amax(-2, keepdim=True),
    "of rows and of columns": lambda s, qkv: STABLE["attached"](s - s.amax(-2, keepdim=True)),
    "of both": lambda s, qkv: s - s.amax((-2, -1), keepdim=True),
    "times a factor of each key": lambda s, qkv: STABLE["attached"](qkv[0] @ qkv[1].mT) * torch.linspace(1, 2, N),
    "softcapped": lambda s, qkv: STABLE["attached"](qkv[0] @ qkv[1].mT).tanh() * 3,
    "without its axis": lambda s, qkv: s - s.amax(-1)[..., None],
    "times a number": lambda s, qkv: torch.sub(s, s.amax(-1, keepdim=True), alpha=0.5),
    "from the other side": lambda s, qkv: s.amax(-1, keepdim=True) - s,
    "plus a number": lambda s, qkv: s - (s.amax(-1, keepdim=True) + 1),
    "in a choice": lambda s, qkv: torch.where(HIDDEN, s, s.amax(-1, keepdim=True)),
    "times itself": lambda s, qkv: s * s.amax(-1, keepdim=True).mul(s.amax(-1, keepdim=True)),
    "read": lambda s, qkv: s - s.amax(-1, keepdim=True) * (s.amax(-1, keepdim=True) > 0),
}


@pytest.mark.parametrize("change", NOT_FUSED.values(), ids=NOT_FUSED)
def test_any_other_use_gives_what_the_model_gets(qkv, change):
    assert_agrees(lambda: change(scores(qkv), qkv).softmax(-1) @ qkv[2], qkv)


def test_the_maximum_is_a_tensor_like_any_other(qkv):
    with FuseAttention():
        s = scores(qkv)
        largest, detached = s.amax(-1, keepdim=True), s.amax(-1, keepdim=True).detach()
        assert largest.shape == detached.shape == (2, 3, N, 1)
        assert largest.requires_grad
        assert not detached.requires_grad
        assert not largest.pending.is_computed
    expected = scores(qkv).amax(-1, keepdim=True)
    assert torch.equal(largest, expected)
    assert torch.equal(detached, expected)
    ours, theirs = (torch.autograd.grad(x.square().sum(), qkv[:2]) for x in (largest, expected))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_positions_of_the_maximum(qkv):
    with FuseAttention():
        s = scores(qkv)
        largest, positions = s.max(-1, keepdim=True)
        assert positions.dtype == torch.int64
        assert positions.shape == (2, 3, N, 1)
        assert not positions.requires_grad
        found = s.gather(-1, positions)
    expected = scores(qkv).max(-1, keepdim=True)
    assert torch.equal(positions, expected.indices)
    assert torch.equal(largest, expected.values)
    assert torch.equal(found, largest)


def test_a_maximum_over_two_tensors_or_all_scores(qkv):
    assert_agrees(lambda: torch.max(scores(qkv), torch.zeros(()).double()).softmax(-1) @ qkv[2], qkv, calls=0)
    assert_agrees(lambda: (scores(qkv) - scores(qkv).max()).softmax(-1) @ qkv[2], qkv)
