"""Learned sinks that are dropped, that one head does not have, or that give a value."""

import pytest
import torch
from tests.auditing import model_zoo as zoo
from tests.auditing.small_transformer import Layer, small
from torch import nn

from saccade import audit, masks

WIDTH, HEADS, CAUSAL = 24, 3, masks.Causal()


class WithSinks(nn.Module):
    """Attention of three heads with one learned logit each, which takes weight and gives no value."""

    def __init__(self, fault=""):
        super().__init__()
        self.fault, self.made, self.out = fault, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x):
        query, key, value = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.made(x).chunk(3, -1))
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (query @ key.mT).masked_fill(hidden, float("-inf"))
        sinks = self.sinks * torch.tensor([1.0, 0.0, 1.0]) if self.fault == "one head" else self.sinks
        if self.fault == "dropped":
            weights = scores.softmax(-1)
        else:
            column = sinks[:, None, None].expand(*scores.shape[:3], 1)
            weights = torch.cat([scores, column], -1).softmax(-1)
            weights, taken = weights[..., :-1], weights[..., -1:]
        out = weights @ value
        if self.fault == "a value":
            out = out + taken * value
        return self.out(out.transpose(1, 2).flatten(2))


def model(fault=""):
    torch.manual_seed(0)
    return small(CAUSAL, lambda: {1: Layer(WIDTH, WithSinks(fault))}, layers=2)


def tokens():
    return torch.randint(40, (2, 16), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("fault, kind", [("dropped", "blind"), ("one head", "blind"), ("a value", "leak")])
def test_a_fault_of_a_sink_is_found_with_its_module(fault, kind):
    claim = audit(model(fault), CAUSAL, inputs=tokens(), claims=["sinks"], tests=2)["sinks"]
    assert claim.verdict == "broken"
    assert (claim.finding.kind, claim.finding.module) == (kind, "layers.1.attention")


def test_right_sinks_are_not_accused_and_stay():
    own = model()
    kept = own.layers[1].attention.sinks.detach().clone()
    claim = audit(own, CAUSAL, inputs=tokens(), claims=["sinks"], tests=2)["sinks"]
    assert (claim.verdict, claim.why) == ("held", "3 sinks in 1 modules")
    assert torch.equal(own.layers[1].attention.sinks, kept)
    report = audit(zoo.gpt_oss(), length=16, claims=["sinks"], tests=2)
    assert report["sinks"].verdict == "held", str(report)
    assert audit(zoo.llama(), length=16, claims=["sinks"], tests=2)["sinks"].verdict == "not answered"
