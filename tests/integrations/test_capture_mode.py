"""A matrix captured from a fused product is the one behind it, and the model's output is bitwise unchanged."""

import math

import pytest
import torch
from tests.integrations.captured_call import close, heard
from tests.sampled import sampled
from torch import nn
from torch.nn import functional as F

import saccade as sc
from saccade import masks
from saccade.integrations.capture_all import capture_all


class Fused(nn.Module):
    """An attention layer written as in timm."""

    def __init__(self, **options):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.options = options

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).movedim(-3, 0).transpose(-3, -2)
        return F.scaled_dot_product_attention(q, k, v, **self.options).transpose(-3, -2).flatten(-2)


class Mixed(nn.Module):
    """A user's layer beside one of torch."""

    def __init__(self):
        super().__init__()
        self.fused = Fused()
        self.encoder = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)

    def forward(self, x):
        x = self.encoder(self.fused(x))
        return F.scaled_dot_product_attention(x, x, F.scaled_dot_product_attention(x, x, x))


def weights_of(q, k, *, attn_mask=None, is_causal=False, scale=None):
    """Return the weights by definition, with torch's alignment of its causal flag."""
    scores = q.double() @ k.double().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(-1).nan_to_num(0.0).float()


@pytest.mark.parametrize("leading", [(3,), (), (2, 3)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": masks.Causal().to_dense(7)[0, 0]},
        {"attn_mask": torch.randn(7, 7)},
        {"attn_mask": torch.randn(4, 1, 7)},
    ],
    ids=["none", "causal", "scale", "mask", "terms", "terms-per-head"],
)
def test_fused_products(leading, options):
    layer, x = Fused(**options).eval(), torch.randn(*leading, 7, 16)
    _, ((name, weights),) = heard(layer, x)
    assert name == "Fused"
    q, k, _ = layer.qkv(x).unflatten(-1, (3, 4, 4)).movedim(-3, 0).transpose(-3, -2)
    close(weights, weights_of(q, k, **options).reshape(-1, 4, 7, 7))


def test_a_mask_for_each_item():
    mask = torch.rand(2, 3, 4, 7, 7) < 0.5
    layer, x = Fused(attn_mask=mask), torch.randn(2, 3, 7, 16)
    _, ((_, weights),) = heard(layer, x)
    q, k, _ = layer.qkv(x).unflatten(-1, (3, 4, 4)).movedim(-3, 0).transpose(-3, -2)
    close(weights, weights_of(q, k, attn_mask=mask).reshape(-1, 4, 7, 7))


def test_a_causal_product_of_fewer_queries_starts_at_the_first_key():
    class Last(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    _, ((_, weights),) = heard(Last(), q, k)
    close(weights, weights_of(q, k, is_causal=True))


def test_grouped_heads():
    class Grouped(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    q, k = torch.randn(2, 6, 3, 8), torch.randn(2, 2, 5, 8)
    _, ((_, weights),) = heard(Grouped(), q, k)
    close(weights, weights_of(q, k.repeat_interleave(3, 1)))


def test_layers_of_both_kinds_in_one_model(fast_path):
    model, x = Mixed().eval(), torch.randn(3, 7, 16)
    _, found = heard(model, x)
    assert [name for name, _ in found] == ["fused", "encoder.self_attn", "Mixed", "Mixed:1"]
    assert len(fast_path) == 2
    assert found[2][1].shape == (1, 3, 7, 7)


def test_two_listen_to_one_model(fast_path):
    model, x, names = Mixed().eval(), torch.randn(3, 7, 16), {"outer": [], "inner": []}
    with torch.no_grad():
        expected = model(x)
        with (
            capture_all(model, lambda name, make: names["outer"].append(name)),
            capture_all(model, lambda name, make: names["inner"].append(name)),
        ):
            assert torch.equal(model(x), expected)
    assert names["outer"] == names["inner"] == ["fused", "encoder.self_attn", "Mixed", "Mixed:1"]
    assert len(fast_path) == 2
    assert torch.overrides._get_current_function_mode_stack() == []


def test_nothing_is_left_behind_by_an_error():
    model = Mixed().eval()
    with capture_all(model, lambda name, make: make()), pytest.raises(RuntimeError, match="shape"):
        model(torch.randn(3, 7, 15))
    assert torch.overrides._get_current_function_mode_stack() == []
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.ci
@pytest.mark.parametrize("ran_before", [False, True])
@pytest.mark.parametrize(
    "make",
    sampled(
        [
            Fused,
            lambda: sc.nn.MultiHeadAttention(16, 4),
            lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval(),
        ],
        2,
    ),
    ids=["product", "ours", "torch"],
)
def test_a_compiled_layer_is_refused_among_others_that_are_not(make, ran_before):
    torch._dynamo.reset()
    layer, x = make(), torch.randn(1, 7, 16)
    model = nn.Sequential(Fused(), torch.compile(layer, backend="eager"))
    with torch.no_grad():
        expected = model[0](x) if not ran_before else model(x)
        with capture_all(model, lambda name, make: make()), pytest.raises(sc.UnsupportedError, match="runs no Python"):
            model(x)
        assert torch.equal((model if ran_before else model[0])(x), expected)
    torch._dynamo.reset()


def test_compiled_modules_without_attention_are_accepted():
    torch._dynamo.reset()
    model, names = nn.Sequential(Fused(), torch.compile(nn.Sequential(nn.Linear(16, 16)), backend="eager")), []
    with torch.no_grad(), capture_all(model, lambda name, make: names.append(name)):
        model(torch.randn(1, 7, 16))
    assert names == ["0"]
    torch._dynamo.reset()
