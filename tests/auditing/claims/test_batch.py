"""Items of a batch that depend on one another: maxima and means over the batch, and rows that are rolled."""

import pytest
import torch
from tests.auditing.small_transformer import Layer, Mixer, Normed, small
from torch import nn

from saccade import audit, masks

WIDTH, CAUSAL = 24, masks.Causal()


def tokens(batch=3):
    return torch.randint(40, (batch, 16), generator=torch.Generator().manual_seed(5))


class Features(nn.Module):
    """Causal linear attention by exponential features, less a maximum over an axis, as Performer computes them."""

    def __init__(self, over_batch):
        super().__init__()
        self.over_batch, self.made = over_batch, nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        key, value = self.made(x).chunk(2, -1)
        most = key.amax() if self.over_batch else key.amax(-1, keepdim=True).cummax(1).values
        weight = (key - most).exp() + 1e-4
        return (weight * value).cumsum(1) / weight.cumsum(1)


class Largest(nn.Module):
    """A feed-forward part scaled by the largest norm of the batch, as for an inverse by iteration in Nystrom."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(x) / x.detach().abs().amax()


class Rolled(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(x + 1e-6 * x.roll(1, 0))


FAULTS = {
    "a maximum over the batch": lambda: Layer(WIDTH, Features(over_batch=True)),
    "a maximum without gradient": lambda: Layer(WIDTH, Mixer(WIDTH, CAUSAL), feed=Largest()),
    "rows of another item": lambda: Layer(WIDTH, Mixer(WIDTH, CAUSAL), feed=Rolled()),
    "batch norm": lambda: Layer(WIDTH, Mixer(WIDTH, CAUSAL), norm=Normed(WIDTH)),
}
WHERE = {"a maximum over the batch": "layers.1.attention", "batch norm": "layers.1.norm"}


@pytest.mark.parametrize("name", FAULTS)
def test_a_dependence_between_items_is_found(name):
    torch.manual_seed(0)
    model = small(CAUSAL, lambda: {1: FAULTS[name]()}, layers=2).train()
    claim = audit(model, CAUSAL, inputs=tokens(), claims=["batch"], tests=2)["batch"]
    assert claim.verdict == "broken"
    assert claim.finding.row[0] != claim.finding.key[0]
    if name != "a maximum without gradient":
        assert claim.finding.module == WHERE.get(name, "layers.1.feed")


def test_independent_items_are_not_accused():
    torch.manual_seed(0)
    model = small(CAUSAL, lambda: {1: Layer(WIDTH, Features(over_batch=False))}, layers=2)
    assert audit(model, CAUSAL, inputs=tokens(), claims=["batch"], tests=2)["batch"].verdict == "held"
    assert audit(model, CAUSAL, inputs=tokens(1), claims=["batch"], tests=2)["batch"].verdict == "not answered"
