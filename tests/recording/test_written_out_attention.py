"""Attention that a module writes out is recorded, in whichever form, or named in `not_recorded`."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import saccade as sc
from saccade import masks
from saccade.recording import UnrecordedLayersWarning, record

X = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(1))
SCALE = 0.25


class Written(nn.Module):
    """A module that is not called attention, with a function of the weights' scores and the values."""

    def __init__(self, function):
        super().__init__()
        self.qkv, self.function = nn.Linear(16, 48), function

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.function(q @ k.mT * SCALE, v)


class Fused(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


def halves(scores, v):
    return torch.cat([part.softmax(-1) for part in scores.chunk(2, 1)], 1) @ v


def into_zeros(scores, v):
    weights = torch.zeros_like(scores)
    weights[:, 1:] = scores.softmax(-1)[:, 1:]
    return weights @ v


def in_place(scores, v):
    weights = F.softmax(scores, -1)
    weights *= 0.5
    return torch.bmm(weights.masked_fill_(weights < 0.01, 0.0), v)


CAUSAL = masks.Causal().to_dense(7)[0]
SCORED = {
    "matmul": lambda scores, v: torch.matmul(torch.softmax(scores, -1), v),
    "at": lambda scores, v: scores.softmax(-1) @ v,
    "bmm": lambda scores, v: F.softmax(scores, dim=-1).bmm(v),
    "module": lambda scores, v: nn.Softmax(-1)(scores) @ v,
    "einsum": lambda scores, v: torch.einsum("bqk,bkd->bqd", scores.softmax(-1), v),
    "einsum, swapped": lambda scores, v: torch.einsum("bkd,bqk->bqd", v, scores.softmax(-1)),
    "transposed": lambda scores, v: (v.mT @ scores.softmax(-1).mT).mT,
    "dropout": lambda scores, v: F.dropout(scores.softmax(-1), 0.1) @ v,
    "dropout module": lambda scores, v: nn.Dropout(0.5)(scores.softmax(-1)) @ v,
    "cast": lambda scores, v: scores.double().softmax(-1).to(v) @ v,
    "type_as": lambda scores, v: scores.double().softmax(-1).type_as(v) @ v,
    "masked scores": lambda scores, v: scores.masked_fill(~CAUSAL, -torch.inf).softmax(-1) @ v,
    "biased": lambda scores, v: (scores + CAUSAL.float()).softmax(-1) @ v,
    "capped": lambda scores, v: (2 * (scores / 2).tanh()).softmax(-1) @ v,
    "reshaped": lambda scores, v: (scores.softmax(-1).view(2, 1, 7, 7) @ v[:, None])[:, 0],
}
BUILT = {
    "clamped": lambda scores, v: scores.clamp(-0.1, 0.1).softmax(-1) @ v,
    "baddbmm": lambda scores, v: torch.baddbmm(torch.zeros_like(v), scores.sin().softmax(-1), v),
    "masked": lambda scores, v: scores.softmax(-1).masked_fill(~CAUSAL, 0) @ v,
    "where": lambda scores, v: torch.where(CAUSAL, scores.softmax(-1), 0.0) @ v,
    "times": lambda scores, v: scores.softmax(-1) * CAUSAL @ v,
    "normalised": lambda scores, v: F.normalize(scores.softmax(-1), p=1, dim=-1) @ v,
    "mixed": lambda scores, v: (0.5 * scores.softmax(-1) + 0.5 * CAUSAL) @ v,
    "in place": in_place,
}
UNKNOWN = {
    "one item": lambda scores, v: scores.softmax(-1)[0] @ v,
    "two softmaxes": lambda scores, v: scores.softmax(-1).softmax(1) @ v,
    "parts": halves,
    "written into": into_zeros,
    "another axis": lambda scores, v: scores.softmax(1) @ v,
}


@pytest.mark.parametrize("form", [*SCORED, *BUILT])
@pytest.mark.parametrize("is_trained", [False, True])
def test_every_form_is_recorded(form, is_trained):
    model = nn.Sequential(Fused(), Written((SCORED | BUILT)[form]))
    has_dropout = "dropout" in form
    with torch.set_grad_enabled(is_trained):
        expected = None if has_dropout else model(X)
        with record(model, keep="qk") as recording:
            out = model(X)
    assert recording.layers == ("0", "1")
    assert recording.not_recorded == ()
    matrix = recording["1"].matrix
    assert isinstance(matrix, sc.AttentionMatrix) == (form in SCORED)
    q, k, v = model[1].qkv(model[0](X)).chunk(3, -1)
    if has_dropout:  # the weights before dropout
        torch.testing.assert_close(matrix.to_dense()[:, 0], (q @ k.mT * SCALE).softmax(-1))
    else:
        assert torch.equal(out, expected)
        torch.testing.assert_close(matrix.to_dense()[:, 0] @ v, expected)


@pytest.mark.parametrize("form", UNKNOWN)
def test_a_form_whose_layout_is_unknown_is_named(form):
    model = nn.Sequential(Fused(), Written(UNKNOWN[form]))
    with torch.no_grad():
        expected = model(X)
        with pytest.warns(UnrecordedLayersWarning, match=r"1 \(Written\)"), record(model) as recording:
            assert torch.equal(model(X), expected)
    assert recording.layers == ("0",)
    assert recording.not_recorded == ("1",)


def test_talking_heads_are_recorded_as_they_are_multiplied():
    """Weights of heads are mixed by a linear layer, between the softmax and the product."""
    mix = nn.Linear(4, 4)

    mixed = []

    def talking(scores, v):
        weights = scores[..., None].expand(-1, -1, -1, 4).softmax(2)
        mixed.append(mix(weights).permute(0, 3, 1, 2))
        return mixed[-1] @ v[:, None]

    model = nn.Sequential(Written(talking))
    with record(model, keep="qk") as recording:
        model(X)
    torch.testing.assert_close(recording["0"].matrix.to_dense(), mixed[-1].detach())


ELEMENTWISE = {
    "classifier": lambda scores, v: scores.softmax(-1),
    "router": lambda scores, v: (torch.stack([v, 2 * v], -1) * scores[..., :2].softmax(-1)[:, :, None]).sum(-1) @ v.mT,
    "best": lambda scores, v: (scores.softmax(-1).topk(1, -1).values * v) @ v.mT,
    "gate": lambda scores, v: (scores.softmax(-1).sum(-1, keepdim=True) * v) @ v.mT,
    "choice": lambda scores, v: v[:, scores.softmax(-1).argmax(-1)[0]] @ v.mT,
    "beside": lambda scores, v: (scores @ v) + scores.softmax(-1).amax(-1, keepdim=True),
    "log": lambda scores, v: scores.log_softmax(-1),
}


@pytest.mark.parametrize("form", ELEMENTWISE)
def test_a_softmax_that_enters_no_product_is_not_named(form):
    model = nn.Sequential(Fused(), Written(ELEMENTWISE[form]))
    with record(model) as recording:
        model(X)
    assert recording.not_recorded == ()


class Ours(nn.Module):
    """Products of saccade's own, in a module of somebody's."""

    def __init__(self, impl):
        super().__init__()
        self.mechanism = sc.mechanisms.Softmax(impl=impl)

    def forward(self, x):
        return (self.mechanism(x[:, None], x[:, None]) @ x[:, None])[:, 0]


@pytest.mark.parametrize("impl", ["auto", "reference", "tiled"])
def test_kernels_of_ours_are_not_taken_for_attention_that_is_written_out(impl):
    model = nn.Sequential(Ours(impl))
    with record(model) as recording:
        model(X)
    assert recording.layers == ("0",)
    assert recording.not_recorded == ()
