"""Triangles whose first rows see nothing, longer than a block of rows, on every kernel; and nothing at all."""

import pytest
import torch
from tests.kernels.native import NATIVE

import saccade as sc
from saccade import masks, positions
from saccade.testing import oracle


@pytest.mark.parametrize("impl", ["fused", "tiled", "reference", NATIVE])
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
