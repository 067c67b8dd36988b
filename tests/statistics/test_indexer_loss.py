"""IndexerLoss is the divergence that its formula says, with its gradient, of any rows and heads."""

import math

import pytest
import torch

from saccade import masks, mechanisms
from saccade.scorers import LightningIndexer
from saccade.statistics import Entropy, IndexerLoss, MatrixInfo
from saccade.support.errors import UnsupportedError


def _definition(weights, scores, seen):
    p = weights.mean(1)
    rows = seen.any(-1)
    logs = scores[:, 0].masked_fill(~seen, -math.inf)[rows].log_softmax(-1)
    p = p[rows]
    p = p / p.sum(-1, keepdim=True)
    return torch.where(p > 0, p * (p.clamp(min=1e-300).log() - logs), 0.0).sum(-1).mean()


@pytest.mark.parametrize("mask", [masks.Causal(), masks.Full(), masks.Causal() & ~masks.Window(2, 0)], ids=str)
@pytest.mark.parametrize("kind", ["all keys", "chosen keys"])
@pytest.mark.parametrize("n", [20, 75])
def test_loss_and_gradient(mask, kind, n):
    dtype = torch.float64
    q, k = torch.randn(2, 2, 4, n, 8, dtype=dtype)
    leaves = [torch.randn(2, *shape, dtype=dtype, requires_grad=True) for shape in ((3, n, 4), (1, n, 4), (3, n))]
    indexer = LightningIndexer(*leaves)
    scores = indexer.scores(range(n), n)
    softmax = mechanisms.Softmax()
    mechanism = softmax if kind == "all keys" else mechanisms.TopK(indexer, 5)
    matrix = mechanism(q, k, mask=mask)
    loss, entropy = matrix.compute(IndexerLoss(indexer), Entropy())
    seen = mask.to_dense(n).expand(2, 1, n, n)[:, 0] if kind == "all keys" else (matrix.to_dense() > 0).any(1)
    expected = _definition(matrix.to_dense(), scores, seen)
    torch.testing.assert_close(loss, expected)
    gradients = torch.autograd.grad(expected, leaves, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(2 * loss, leaves), tuple(2 * x for x in gradients))
    written_out = scores.detach().requires_grad_()
    (own,) = matrix.compute(IndexerLoss(written_out))
    expected = _definition(matrix.to_dense(), written_out, seen)
    torch.testing.assert_close(torch.autograd.grad(own, written_out), torch.autograd.grad(expected, written_out))
    torch.testing.assert_close(entropy, matrix.entropy())


def test_parts_are_merged():
    q, k = torch.randn(2, 1, 2, 9, 4, dtype=torch.float64)
    matrix, statistic = mechanisms.Softmax()(q, k), IndexerLoss(torch.randn(1, 1, 9, 9, dtype=torch.float64))
    states = []
    for head in (0, 1):
        state = statistic.start(MatrixInfo.of(matrix))
        for block in matrix.blocks(head=head):
            state = statistic.add(state, block)
        states.append(state)
    torch.testing.assert_close(statistic.finish(statistic.merge(*states)), matrix.compute(statistic)[0])


def test_wrong_arguments_are_refused():
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="scores must have shape"):
        mechanisms.Softmax()(x, x).compute(IndexerLoss(torch.zeros(1, 2, 4, 4)))
    with pytest.raises(TypeError, match="scores must be a tensor or a scorer of rows"):
        IndexerLoss(3)
    with pytest.raises(UnsupportedError, match="do not sum to 1"):
        mechanisms.Linear("squared_relu", eps=1e-6)(x, x).compute(IndexerLoss(torch.zeros(1, 1, 4, 4)))
