"""Finite values in padding never affect a result, even if they are so large that scores of hidden pairs overflow."""

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


@pytest.mark.parametrize("impl", ["auto", "fused", "matmul", "tiled", "reference"])
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


@pytest.mark.parametrize("impl", ["auto", "fused", "matmul", "tiled", "reference"])
def test_beside_nan(impl):
    query, key, value = torch.randn(2, 4, 9, 8) * 3, torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    expected = attended(query, key, value, TEXTS, "reference")
    key[0, :, 5:], key[1, :, 7:], value[1, 1, 8], value[0, 0, 5:] = 2e38, math.nan, math.inf, 2e38
    for own, other in zip(attended(query, key, value, TEXTS, impl), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


def test_a_visible_overflow_shows():
    query, key, value = torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4)
    key[..., 1, :] = 3e38
    for impl in ("fused", "matmul", "tiled", "reference"):
        out = sc.attention(query, key, value, masks.Causal(), impl=impl)
        assert out[0, 0, :, 0].isnan().tolist() == [False, True, True]


@pytest.mark.parametrize("impl", ["fused", "matmul", "tiled", "reference"])
@pytest.mark.parametrize("wanted", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("filled", ["key", "value"])
def test_gradients_of_one_input_alone(filled, wanted, impl):
    tensors = [torch.randn(2, 2, 9, 8) for _ in range(3)]
    mask, upstream = masks.Window(2, 1) & TEXTS, torch.randn(2, 2, 9, 8)
    tensors[wanted].requires_grad_()
    expected = torch.autograd.grad(sc.attention(*tensors, mask, impl="reference"), tensors[wanted], upstream)
    place = ["query", "key", "value"].index(filled)
    hidden = ~TEXTS.to_dense(9, batch=2).any(2)[..., None]
    given = [x.masked_fill(hidden, 3e38) if number == place else x for number, x in enumerate(tensors)]
    with torch.device("meta"):  # what is made beside them stands where they do
        found = torch.autograd.grad(sc.attention(*given, mask, impl=impl), tensors[wanted], upstream)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", ["tiled", "reference"])
def test_dropout(impl):
    query, key, value = (torch.randn(2, 2, 9, 8, requires_grad=True) for _ in range(3))
    hidden = ~TEXTS.to_dense(9, batch=2).any(2)[..., None]
    found = []
    for filled in (value, value.masked_fill(hidden, 3e38)):
        matrix = sc.AttentionMatrix(query, key, TEXTS, impl=impl)
        out = matrix.matmul(filled, dropout_p=0.4, seed=3)
        found.append((out, *torch.autograd.grad((out * 9).sin().sum(), (query, key, value))))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("impl", ["fused", "matmul", "tiled"])
def test_large_only_beside_what_is_large(impl):
    query, key, value = (torch.randn(2, 2, 9, 8, requires_grad=True) for _ in range(3))
    upstream = torch.randn(2, 2, 9, 8) * 1e19
    hidden = ~TEXTS.to_dense(9, batch=2).any(2)[..., None]
    expected = torch.autograd.grad(sc.attention(query, key, value, TEXTS, impl=impl), (query, key, value), upstream)
    out = sc.attention(query, key, value.masked_fill(hidden, 1e20), TEXTS, impl=impl)
    found = torch.autograd.grad(out, (query, key, value), upstream)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e14)  # of numbers about 1e19


def test_a_key_that_others_see_is_hidden_from_these():
    query, key, value = torch.rand(1, 2, 9, 8) + 1, torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    found, mask = [], masks.Predicate(lambda b, h, q, kv: kv <= q)
    for large in (0.0, 2e38):
        key[:, :, 5] = large
        tensors = [x.clone().requires_grad_() for x in (query, key, value)]
        out = sc.attention(*tensors, mask, impl="fused")[:, :, :5]
        found.append((out, *(x[:, :, :5] for x in torch.autograd.grad(out.sin().sum(), tensors))))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("impl", ["fused", "matmul", "tiled"])
def test_nan_from_above_flows_back(impl):
    tensors = [torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3)]
    out = sc.attention(*tensors, masks.Causal(), impl=impl)
    for x in torch.autograd.grad(out, tensors, torch.full_like(out, math.nan)):
        assert x.isnan().all()


@pytest.mark.parametrize("impl", ["fused", "matmul", "tiled", "reference"])
def test_a_key_whose_scores_are_minus_infinity_stays_away(impl):
    query, key, value = torch.rand(2, 2, 9, 8) + 1, torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    mask, found = TEXTS & masks.Predicate(lambda b, h, q, kv: (q + kv) % 4 != 1), []
    for number in (0.0, -2e38, -math.inf):
        own = key.clone()
        own[:, :, 2] = number  # seen, but all of its scores are -inf
        seen = mask & masks.Predicate(lambda b, h, q, kv: kv != 2) if number == 0.0 else mask
        tensors = [x.clone().requires_grad_() for x in (query, own, value)]
        out = sc.attention(*tensors, seen, impl=impl)
        of_query, of_key, of_value = torch.autograd.grad(out.sin().sum(), tensors)
        found.append((out, of_query, of_value, of_key[:, :, 3:]))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])
