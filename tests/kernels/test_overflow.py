"""What stands in padding may be finite and so large that a hidden pair's score overflows: nothing of it shows."""

import math

import pytest
import torch

import saccade as sc
from saccade import masks

TEXTS = masks.Padding([5, 7])
MASKS = {
    "padding": TEXTS,
    "causal": masks.Causal() & TEXTS,
    "window": masks.Window(2, 0) & TEXTS,
    "rows that see nothing": masks.Predicate(lambda b, h, q, kv: (kv < 4) & (q > 2)),
}
LARGE = {"large": 1e38, "largest": torch.finfo(torch.float32).max, "of both signs": -2e38}


def attended(query, key, value, mask, impl):
    tensors = [x.clone().requires_grad_() for x in (query, key, value)]
    out, lse = sc.attention_with_lse(*tensors, mask, impl=impl)
    seen = lse.masked_fill(lse == -math.inf, 0.0)
    return out, lse, *torch.autograd.grad(out.sin().sum() + seen.sum(), tensors)


@pytest.mark.parametrize("impl", ["auto", "fused", "tiled", "reference"])
@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize("name", MASKS)
def test_hidden_scores_may_overflow(name, large, impl):
    query, key, value = torch.randn(2, 4, 9, 8) * 3, torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    expected = attended(query.double(), key.double(), value.double(), MASKS[name], "reference")
    hidden = ~MASKS[name].to_dense(9, batch=2, heads=1).any(2)[..., None]
    filled = key.masked_fill(hidden, LARGE[large]), value.masked_fill(hidden, LARGE[large])
    assert (query[:, ::2] @ filled[0].mT).isinf().any(), "some score overflows"
    for own, other in zip(attended(query, *filled, MASKS[name], impl), expected, strict=True):
        torch.testing.assert_close(own, other.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", ["auto", "fused", "tiled", "reference"])
def test_beside_nan(impl):
    query, key, value = torch.randn(2, 4, 9, 8) * 3, torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    expected = attended(query, key, value, TEXTS, "reference")
    key[0, :, 5:], key[1, :, 7:], value[1, 1, 8], value[0, 0, 5:] = 2e38, math.nan, math.inf, 2e38
    for own, other in zip(attended(query, key, value, TEXTS, impl), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def test_what_is_seen_and_overflows_is_not_hidden():
    query, key, value = torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4)
    key[..., 1, :] = 3e38
    for impl in ("fused", "tiled", "reference"):
        out = sc.attention(query, key, value, masks.Causal(), impl=impl)
        assert out[0, 0, :, 0].isnan().tolist() == [False, True, True]
