"""Relevance and gradient rollout are the dense products of all layers, in memory linear in the length."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.matrix import DenseMatrix, GradientMatrix
from saccade.statistics import gradient_rollout, relevance, rollout

N, HEADS, WIDTH, BATCH = 9, 4, 3, 2


def trained(mask: masks.Mask | None, kv_heads: int = 2, layers: int = 3):
    """A model of attention layers: lazy matrices, lazy gradients, and autograd's gradients by weights written out."""
    torch.manual_seed(layers + kv_heads)
    x = torch.randn(BATCH, N, HEADS * WIDTH, dtype=torch.float64)
    loss, matrices, weights, outputs, values = 0.0, [], [], [], []
    for _ in range(layers):
        q, k, v, o = (
            torch.randn(x.shape[2], n * WIDTH, dtype=torch.float64) for n in (HEADS, kv_heads, kv_heads, HEADS)
        )
        query, key, value = ((x @ w).unflatten(2, (-1, WIDTH)).transpose(1, 2) for w in (q, k, v))
        matrices.append(sc.AttentionMatrix(query.detach(), key.detach(), mask))
        dense = sc.AttentionMatrix(query, key, mask).to_dense()
        dense.requires_grad_() if dense.is_leaf else dense.retain_grad()
        out = dense @ value.repeat_interleave(HEADS // kv_heads, 1)
        out.retain_grad()
        weights, outputs, values = [*weights, dense], [*outputs, out], [*values, value.detach()]
        x = torch.tanh(x + out.transpose(1, 2).flatten(2) @ o)
    loss = x[:, -1].sin().sum()
    loss.backward()
    gradients = [GradientMatrix(out.grad, value) for out, value in zip(outputs, values, strict=True)]
    return matrices, gradients, [one.detach() for one in weights], [one.grad for one in weights]


def positive_means(weights: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    return [torch.relu(a * g).mean(1) for a, g in zip(weights, grads, strict=True)]


MASKS = [None, masks.Causal(), masks.Causal() & masks.Window(2, 0), masks.Window(1, 1) | masks.Global([0])]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_relevance_is_the_product_of_all_layers(mask, kv_heads):
    matrices, gradients, weights, grads = trained(mask, kv_heads)
    want = torch.eye(N, dtype=torch.float64).expand(BATCH, N, N)
    for mean in positive_means(weights, grads):
        want = want + mean @ want
    found = relevance(matrices, gradients, [0, N - 1, -3])
    assert found.shape == (BATCH, 3, N)
    torch.testing.assert_close(found, want[:, [0, N - 1, N - 3]])


@pytest.mark.parametrize("residual", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_gradient_rollout_is_the_product_of_scaled_layers(mask, residual):
    matrices, gradients, weights, grads = trained(mask)
    eye = torch.eye(N, dtype=torch.float64)
    want = eye.expand(BATCH, N, N)
    for mean in positive_means(weights, grads):
        sums = mean.sum(-1, keepdim=True)
        scaled = torch.where(sums > 0, mean / sums, eye)
        want = (residual * eye + (1 - residual) * scaled) @ want
    assert any((mean.sum(-1) == 0).any() for mean in positive_means(weights, grads))  # rows without a positive entry
    found = gradient_rollout(matrices, gradients, range(N), residual=residual)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(found.sum(-1), torch.ones(BATCH, N, dtype=torch.float64))


def test_gradients_of_one_are_a_rollout_and_scale_does_not_matter():
    matrices, gradients, *_ = trained(masks.Causal())
    ones = [DenseMatrix(torch.ones(one.shape, dtype=torch.float64)) for one in matrices]
    want = rollout(matrices, [4, 8], residual=0.3)
    torch.testing.assert_close(gradient_rollout(matrices, ones, [4, 8], residual=0.3), want)
    small = [GradientMatrix(1e-9 * one.grad_out, one.value) for one in gradients]
    torch.testing.assert_close(gradient_rollout(matrices, small, [8]), gradient_rollout(matrices, gradients, [8]))


def test_half_precision_is_summed_in_single():
    x = torch.randn(1, 2, 6, 4, dtype=torch.bfloat16)
    matrix, gradient = sc.AttentionMatrix(x, x), GradientMatrix(x, x)
    found = relevance([matrix], [gradient], [5])
    want = torch.eye(6) + torch.relu(matrix.to_dense() * gradient.to_dense()).mean(1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[:, 0], want[:, 5])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Python measures no peak of memory there")
def test_a_long_text_takes_linear_memory():
    """16,384 tokens: one matrix of one head alone would take a gigabyte."""
    code = """
import resource, torch
from saccade import AttentionMatrix, masks
from saccade.matrix import GradientMatrix
from saccade.statistics import gradient_rollout, relevance
torch.set_num_threads(1)
x = torch.randn(1, 2, 16384, 8)
A, G = AttentionMatrix(x, x, masks.Causal()), GradientMatrix(x, x)
small = AttentionMatrix(x[:, :, :64], x[:, :, :64], masks.Causal()), GradientMatrix(x[:, :, :64], x[:, :, :64])
relevance([small[0]], [small[1]], [-1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
relevance([A], [G], [-1]), gradient_rollout([A], [G], [-1])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    grown = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert grown < 100  # megabytes


def test_what_does_not_fit_is_refused():
    x = torch.randn(1, 2, 4, 3)
    matrix, gradient = sc.AttentionMatrix(x, x), GradientMatrix(x, x)
    wide = sc.AttentionMatrix(x, torch.randn(1, 2, 6, 3))
    for function in (relevance, gradient_rollout):
        name = function.__name__
        with pytest.raises(ValueError, match=rf"{name}: matrices must contain one for each layer; got none"):
            function([], [], [0])
        with pytest.raises(ValueError, match=rf"{name}: gradients must be one for each of 1 matrices; got 2"):
            function([matrix], [gradient, gradient], [0])
        with pytest.raises(ValueError, match=rf"{name}: matrices must all be \[1, heads, 4, 4\].* at layer 1"):
            function([matrix, wide], [gradient, gradient], [0])
        with pytest.raises(ValueError, match=r"gradients must be \[1, 2, 4, 4\] at layer 0"):
            function([matrix], [GradientMatrix(x[:, :1], x[:, :1])], [0])
        with pytest.raises(ValueError, match="each of queries must be"):
            function([matrix], [gradient], [4])
        with pytest.raises(sc.UnsupportedError, match="layer 0 contains scores"):
            function([matrix.scores], [gradient], [0])
    with pytest.raises(ValueError, match="gradient_rollout: residual must be from 0 to 1"):
        gradient_rollout([matrix], [gradient], [0], residual=1.5)
