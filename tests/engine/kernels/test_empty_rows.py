"""Rows that see nothing, on every kernel: the first of a triangle, those whose scores are all -inf, and no rows."""

import math

import pytest
import torch
from tests.engine.kernels.native_levels import NATIVE

import saccade as sc
from saccade import masks, positions
from saccade.testing import oracle


@pytest.mark.parametrize("impl", ["fused", "matmul", "tiled", "reference", NATIVE])
@pytest.mark.parametrize("lengths", [(129, 1), (200, 10), (700, 300)], ids=str)
def test_rows_before_the_first_key(impl: str, lengths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    q_len, kv_len = lengths
    dtype = torch.float32 if impl == "native" else torch.float64
    query, key, value = (torch.randn(1, 2, n, 8, dtype=dtype, requires_grad=True) for n in (q_len, kv_len, kv_len))
    out, lse = sc.attention_with_lse(query, key, value, masks.Causal(), impl=impl)
    expected, expected_lse = oracle.attention(query, key, value, masks.Causal().to_dense(q_len, kv_len))
    torch.testing.assert_close(out, expected.to(dtype))
    torch.testing.assert_close(lse, expected_lse.to(dtype))
    inputs, grad = (query, key, value), torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(x, inputs, grad.to(x.dtype)) for x in (out, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["auto", "tiled", "reference", NATIVE])
@pytest.mark.parametrize("lengths", [(2, 0), (0, 3), (0, 0)], ids=str)
@pytest.mark.parametrize("bias", [positions.ALiBi(2), positions.T5(2), positions.Clipped(2, 3)], ids=repr)
def test_a_bias_of_no_pairs(impl: str, lengths: tuple[int, int], bias: positions.Bias) -> None:
    query, key = (torch.randn(1, 2, length, 4, requires_grad=True) for length in lengths)
    out = sc.attention(query, key, key, bias=bias, impl=impl)
    assert out.tolist() == torch.zeros(1, 2, lengths[0], 4).tolist()
    out.sum().backward()
    assert query.grad is not None


@pytest.mark.parametrize("impl", ["auto", "tiled", "reference", NATIVE])
@pytest.mark.parametrize("lengths", [(2, 0), (0, 3), (0, 0)], ids=str)
@pytest.mark.parametrize("is_whole", [True, False])
def test_gradients_of_a_bias_of_no_pairs(impl: str, lengths: tuple[int, int], is_whole: bool) -> None:
    query, key = (torch.randn(1, 2, length, 4) for length in lengths)
    bias = torch.randn(1, 2, lengths[0] if is_whole else 1, lengths[1], requires_grad=True)
    (grad,) = torch.autograd.grad(sc.attention(query, key, key, bias=bias, impl=impl).sum(), bias)
    assert torch.equal(grad, torch.zeros_like(bias))


@pytest.mark.parametrize("impl", ["fused", "matmul", "tiled", "reference", NATIVE])
@pytest.mark.parametrize("heads, q_len", [(4, 60), (2, 60), (4, 3)])
@pytest.mark.parametrize("mask", [None, masks.Causal(), masks.sparse_transformer(5), masks.Window(2, 0)], ids=str)
def test_keys_of_minus_infinity_are_not_there(mask: masks.Mask | None, heads: int, q_len: int, impl: str) -> None:
    dtype = torch.float32 if impl == "native" else torch.float64
    q, k, v = (torch.randn(2, own, n, 8, dtype=dtype) for own, n in ((heads, q_len), (2, 60), (2, 60)))
    q, k[0, :, 20:50], k[1] = q.abs(), -math.inf, -math.inf  # all scores of the second item
    allowed = (masks.Full() if mask is None else mask).to_dense(q_len, 60, batch=2).clone()
    allowed[0, :, :, 20:50] = allowed[1] = False
    out, lse = sc.attention_with_lse(q, k, v.requires_grad_(), mask, impl=impl)
    finite = k.nan_to_num(0.0, 0.0, 0.0)
    expected, expected_lse = oracle.attention(q, finite, v, allowed.expand(-1, heads, -1, -1))
    torch.testing.assert_close(out, expected.to(out.dtype))
    torch.testing.assert_close(lse, expected_lse.to(lse.dtype))
    weights = torch.randn_like(out)
    found, wanted = (torch.autograd.grad((x * weights).sum(), v) for x in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
