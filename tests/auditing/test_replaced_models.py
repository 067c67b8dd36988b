"""Audits of models whose attention was replaced: their own code runs, and saccade computes its attention."""

import pytest
import torch
from tests.integrations.own_code_attention import D, Einsum, Written
from torch import nn

import saccade as sc
from saccade import masks


class Model(nn.Module):
    """Two layers of attention in a model's own code, with or without a causal mask of its own."""

    def __init__(self, is_causal):
        super().__init__()
        self.embed, self.head, self.is_causal = nn.Embedding(50, D), nn.Linear(D, 50), is_causal
        self.layers = nn.ModuleList([Written(), Einsum()])

    def forward(self, ids):
        x, n = self.embed(ids), ids.shape[1]
        allowed = torch.ones(n, n, dtype=torch.bool).tril() if self.is_causal else None
        for layer in self.layers:
            x = x + layer(x, allowed=allowed)
        return self.head(x)


def audited(rule, *, is_causal=True, mask=None):
    torch.manual_seed(0)
    model = Model(is_causal).eval()
    sc.replace_attention(model, mask=mask, cross_attention=[])
    return sc.audit(model, rule, inputs=torch.randint(0, 50, (2, 24)))


@pytest.mark.parametrize(
    "is_causal, mask, rule",
    [
        (True, None, masks.Causal()),
        (True, masks.Window(4, 4), masks.Causal() & masks.Window(4, 0)),
        (False, masks.Window(3, 2), masks.Window(3, 2)),
    ],
)
def test_a_model_holds_its_mask_and_the_one_that_was_added(is_causal, mask, rule):
    report = audited(rule, is_causal=is_causal, mask=mask)
    assert [claim.verdict for claim in report.claims] == ["held"] * 3, str(report)


def test_a_leak_is_named_with_its_layer():
    report = audited(masks.Causal(), is_causal=False)
    broken = {claim.name: claim for claim in report.claims if claim.verdict == "broken"}
    assert "depends on token" in str(report)
    assert "layers.0" in str(report)
    assert set(broken) == {"reach", "by layer"}


def test_a_window_that_sees_too_little_is_named():
    report = audited(masks.Causal(), mask=masks.Window(4, 4))
    assert "does not see token" in str(report)
    assert {claim.name: claim.verdict for claim in report.claims}["sight"] == "broken"
