"""Sums and chains of matrices: products, parts and questions equal those of the dense ones."""

import numpy as np
import pytest
import torch

import saccade as sc
from saccade import masks, mechanisms
from saccade.statistics import Received

B, H, N, D = 2, 4, 11, 8


def tensors(kv_heads=H, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = [(B, H, N, D), (B, kv_heads, N, D), (B, kv_heads, N, 5)]
    return [torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]


def one(kv_heads=H, seed=0, mask=None):
    query, key, _ = tensors(kv_heads, seed)
    return sc.AttentionMatrix(query, key, mask if mask is not None else masks.Causal())


def grouped(value):
    return value.repeat_interleave(H // value.shape[1], 1)


@pytest.mark.parametrize("kv_heads", [(4, 4), (2, 2), (1, 4), (4, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("way", ["sum", "difference", "chain"])
def test_products_and_questions_are_those_of_the_dense_form(kv_heads, way):
    first, second = one(kv_heads[0], 1), one(kv_heads[1], 2, masks.Window(2, 3))
    gate = torch.rand(H, 1, 1, dtype=torch.float64, requires_grad=True)
    made = {"sum": first + 0.5 * second, "difference": first - gate * second, "chain": first @ second}[way]
    one_dense, other_dense = first.to_dense(), second.to_dense()
    dense = {
        "sum": one_dense + 0.5 * other_dense,
        "difference": one_dense - gate * other_dense,
        "chain": one_dense @ other_dense,
    }[way]
    torch.testing.assert_close(made.to_dense(), dense)
    torch.testing.assert_close(made[1, 2, 3:7, ::2], dense[1, 2, 3:7, ::2])
    value = torch.randn(B, made.kv_heads, N, 5, dtype=torch.float64)
    torch.testing.assert_close(made @ value, dense @ grouped(value))
    x = torch.randn(B, H, N, 3, dtype=torch.float64)
    torch.testing.assert_close(made.mT @ x, dense.mT @ x)
    torch.testing.assert_close(x.mT @ made, x.mT @ dense)
    torch.testing.assert_close(made.compute(Received())[0].double(), dense.sum(2))
    assert made.is_stochastic == (way == "chain")


def test_gradients_reach_what_both_were_made_of():
    query, key, value = tensors()
    other = tensors(seed=3)[0]
    gate = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    leaves = [query, key, value, other, gate]

    def out(build):
        first, second = build(query, key), build(other, key)
        return (first - gate * second) @ value, first @ second @ value

    def dense(q, k):
        return (q @ k.mT / D**0.5).softmax(-1)

    grad = torch.randn(B, H, N, 5, dtype=torch.float64)
    for lazy, written in zip(out(sc.AttentionMatrix), out(dense), strict=True):
        torch.testing.assert_close(lazy, written)
        got = torch.autograd.grad(lazy, leaves, grad, allow_unused=True, retain_graph=True)
        expected = torch.autograd.grad(written, leaves, grad, allow_unused=True, retain_graph=True)
        for own, their in zip(got, expected, strict=True):
            torch.testing.assert_close(own, their)


def test_differential_attention_needs_no_matrix():
    """Ye et al. 2024, arXiv:2410.05258: the difference of two softmaxes; 20,000 tokens would be 3 GB each."""
    torch.manual_seed(0)
    first, second, value = (torch.randn(1, 1, 20_000, 16) for _ in range(3))
    mask = masks.Causal() & masks.Window(500, 0)
    difference = sc.AttentionMatrix(first, first, mask) - 0.8 * sc.AttentionMatrix(second, second, mask)
    assert (difference @ value).shape == value.shape
    row = difference[0, 0, 12_345]
    torch.testing.assert_close((difference @ value)[0, 0, 12_345], row @ value[0, 0], atol=1e-4, rtol=1e-4)
    assert abs(row.sum().item() - 0.2) < 1e-4


def test_factors_of_factors_and_of_numbers():
    A = one()
    dense = A.to_dense()
    torch.testing.assert_close((-(A + A) / 4).to_dense(), -dense / 2)
    torch.testing.assert_close((2 * (3 * A - A)).to_dense(), 4 * dense)
    torch.testing.assert_close((np.float64(0.5) * A - np.float32(2) * A).to_dense(), -1.5 * dense)
    torch.testing.assert_close((sum([A, A, A]) / 3).to_dense(), dense)
    assert "AttentionMatrix" in repr(A - 2 * A)
    assert "@" in repr(A @ A)


def test_linear_attention_takes_part():
    query, key, value = (x.detach() for x in tensors())
    first, second = mechanisms.Linear()(query, key), sc.AttentionMatrix(query, key)
    torch.testing.assert_close((first - second) @ value, first @ value - second @ value)
    torch.testing.assert_close((first @ second).to_dense(), first.to_dense() @ second.to_dense())
