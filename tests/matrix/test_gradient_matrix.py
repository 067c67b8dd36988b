"""The gradient by the weights is autograd's on weights that are written out, in products, parts and statistics."""

import pytest
import torch
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.matrix import ElementwiseProduct, GradientMatrix
from saccade.recording.derived_matrices import ChosenHeads
from saccade.statistics import LargestWeight, Received

MASKS = [None, masks.Causal(), masks.Causal() & masks.Window(3, 0), masks.Causal() & masks.Strided(3)]


def problem(
    q_len: int, kv_len: int, kv_heads: int, mask: masks.Mask | None
) -> tuple[sc.AttentionMatrix, Tensor, Tensor]:
    """An attention matrix, values, and a gradient by the output."""
    seeded = torch.Generator().manual_seed(q_len * kv_len + kv_heads)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=seeded, dtype=torch.float64)

    matrix = sc.AttentionMatrix(drawn(2, 4, q_len, 5), drawn(2, kv_heads, kv_len, 5), mask)
    return matrix, drawn(2, kv_heads, kv_len, 3), drawn(2, 4, q_len, 3)


def by_autograd(matrix: sc.AttentionMatrix, value: Tensor, grad_out: Tensor) -> Tensor:
    weights = matrix.to_dense().requires_grad_()
    out = weights @ value.repeat_interleave(4 // value.shape[1], 1)
    return torch.autograd.grad(out, weights, grad_out)[0]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_it_is_the_gradient_by_the_weights(mask, kv_heads):
    matrix, value, grad_out = problem(7, 11, kv_heads, mask)
    gradient, want = GradientMatrix(grad_out, value), by_autograd(matrix, value, grad_out)
    torch.testing.assert_close(gradient.to_dense(), want)
    torch.testing.assert_close(gradient[1, 2, 3:6:2, ::3], want[1, 2, 3:6:2, ::3])
    torch.testing.assert_close(gradient.compute(Received())[0], want.sum(-2))
    for block in matrix.blocks():
        found = want[block.batch, block.heads][:, :, block.queries][..., block.keys]
        torch.testing.assert_close(gradient.entries(block), found)
        torch.testing.assert_close(super(GradientMatrix, gradient).entries(block), found)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_products_take_no_blocks(kv_heads, monkeypatch):
    matrix, value, grad_out = problem(7, 11, kv_heads, None)
    gradient, want = GradientMatrix(grad_out, value), by_autograd(matrix, value, grad_out)
    monkeypatch.setattr(GradientMatrix, "blocks", None)
    other, x = torch.randn(2, kv_heads, 11, 6).double(), torch.randn(2, 4, 7, 6).double()
    torch.testing.assert_close(gradient @ other, want @ other.repeat_interleave(4 // kv_heads, 1))
    torch.testing.assert_close(gradient.mT @ x, want.mT @ x)


def test_a_product_with_dropout_takes_blocks():
    gradient = GradientMatrix(torch.ones(1, 1, 4, 2), torch.ones(1, 1, 64, 2))
    out = gradient.matmul(torch.ones(1, 1, 64, 1), dropout_p=0.5, seed=3)
    assert set((out / 4).flatten().tolist()) <= set(range(65))
    assert 0.3 < out.mean() / 256 < 1.7


@pytest.mark.parametrize("keep_positive", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_attention_times_gradient(mask, kv_heads, keep_positive):
    matrix, value, grad_out = problem(7, 11, kv_heads, mask)
    want = matrix.to_dense() * by_autograd(matrix, value, grad_out)
    want = want.clamp(min=0) if keep_positive else want
    product = ElementwiseProduct(matrix, GradientMatrix(grad_out, value), keep_positive=keep_positive)
    torch.testing.assert_close(product.to_dense(), want)
    torch.testing.assert_close(product[0, 3, 2:5], want[0, 3, 2:5])
    torch.testing.assert_close(product.compute(LargestWeight())[0], want.amax(-1).clamp(min=0))
    torch.testing.assert_close(product @ value, want @ value.repeat_interleave(4 // kv_heads, 1))
    assert not product.is_stochastic


def test_hidden_pairs_are_not_computed(monkeypatch):
    matrix, value, grad_out = problem(512, 512, 2, masks.sliding_window(4))
    seen = []
    whole = GradientMatrix.entries
    monkeypatch.setattr(
        GradientMatrix, "entries", lambda self, block: seen.append(block.weights.numel()) or whole(self, block)
    )
    (matrix * GradientMatrix(grad_out, value)).received()
    assert sum(seen) == sum(block.weights.numel() for block in matrix.blocks()) < 2 * 4 * 512 * 512 / 2


def test_the_sign_of_a_product_makes_one():
    matrix, value, grad_out = problem(5, 5, 4, masks.Causal())
    product = matrix * GradientMatrix(grad_out, value)
    assert isinstance(product, ElementwiseProduct)
    torch.testing.assert_close(product.to_dense(), matrix.to_dense() * (grad_out @ value.mT))


def test_blocks_of_several_heads_meet_groups_of_other_keys():
    matrix, value, grad_out = problem(6, 6, 1, None)  # all heads in one block
    finer = GradientMatrix(grad_out, torch.cat([value, 2 * value], 1))
    want = matrix.to_dense() * (grad_out @ finer.value.repeat_interleave(2, 1).mT)
    torch.testing.assert_close((matrix * finer).to_dense(), want)
    chosen = ChosenHeads(matrix, [3, 1])
    part = GradientMatrix(grad_out[:, [3, 1]], finer.value[:, [1, 0]])
    torch.testing.assert_close((chosen * part).to_dense(), want[:, [3, 1]])


def test_what_does_not_fit_is_refused():
    x = torch.randn(1, 2, 4, 3)
    matrix = sc.AttentionMatrix(x, x)
    with pytest.raises(ValueError, match=r"must have shape \[1, 2, 4, 4\] to be the right operand of \*"):
        matrix * GradientMatrix(x, x[:, :, :3])
    with pytest.raises(sc.UnsupportedError, match="masked pairs of a score matrix are -inf"):
        matrix.scores * GradientMatrix(x, x)
