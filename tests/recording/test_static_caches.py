"""Attention over a static cache in a model's own code is recorded at the positions of its queries."""

import pytest
import torch
from tests.integrations.own_code_attention import FUNCTIONS, D, H, StaticCache, heads
from torch import nn
from torch.nn import functional as F

import saccade as sc
from saccade import masks
from saccade.recording.layer_record import statistics_of

LENGTH, USED = 12, 9
STEPS = {"all at once": [9], "steps": [5, 1, 1, 2], "single tokens": [1] * 9}
PLACED = ("self_mass", "previous_mass", "distance", "entropy")


def inputs():
    return torch.randn(2, USED, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("rule", [None, masks.Window(2, 0)], ids=["causal", "window"])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_static_cache_is_one_run_with_the_positions_of_its_queries(function, steps, rule):
    model, q = nn.Sequential(StaticCache(function, LENGTH)), heads(inputs())
    with sc.record(model, keep=("qk", "statistics")) as recording:
        for x in inputs().split(steps, 1):
            model[0](x, rule)
    expected = sc.AttentionMatrix(q, q.sin(), masks.Causal() if rule is None else rule)
    assert len(recording.runs("0")) == 1
    weights = recording["0"].matrix.to_dense()
    torch.testing.assert_close(weights[..., :USED], expected.to_dense())
    assert not weights[..., USED:].any()
    _, statistics = statistics_of(expected)
    for name in PLACED:
        torch.testing.assert_close(recording["0"].statistics[name], statistics[name])


class Cross(nn.Module):
    """Attention to a memory that is padded at the end."""

    def forward(self, x, memory, is_token):
        k = heads(memory)
        return F.scaled_dot_product_attention(heads(x), k, k, is_token[:, None, None]).transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    """A layer of self-attention with a cache, and one that attends to a memory."""

    def __init__(self):
        super().__init__()
        self.own, self.other = StaticCache(FUNCTIONS["sdpa"], LENGTH), Cross()

    def forward(self, x, memory, is_token):
        return self.other(self.own(x), memory, is_token)


def test_steps_over_a_padded_memory_are_one_run():
    model, memory = Decoder(), torch.linspace(-3, 3, 2 * 7 * D, dtype=torch.float64).sin().view(2, 7, D)
    is_token = torch.arange(7) < torch.tensor([[4], [5]])
    with sc.record(model, keep="qk") as recording:
        outs = [model(x, memory, is_token) for x in inputs().split([5, 1, 1, 2], 1)]
    (run,) = recording.runs("other")
    assert run.matrix.shape == (2, H, USED, 7)
    torch.testing.assert_close((run.matrix @ heads(memory)).transpose(1, 2).flatten(2), torch.cat(outs, 1))
