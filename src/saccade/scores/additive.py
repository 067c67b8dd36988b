"""Additive: a score that a small network computes from query and key."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from saccade.scores.base import Prepared, Score, widened
from saccade.support.errors import unsupported
from saccade.support.numerics import widest_dtype
from saccade.support.validation import check_int

_AT_ONCE = 1 << 17  # hidden-layer entries in memory at a time: half a megabyte, which fits into the CPU cache


class Additive(Score):
    r"""The additive score: a network with one hidden layer, :math:`v^\top \tanh(W_q q + W_k k)`.

    The products with W_q and W_k are computed once. The hidden layer exists for only a few pairs at a time, forward and
    backward, so memory is O(n·hidden) instead of O(n·m·hidden).

    Args:
        query_dim: width of queries.
        key_dim: width of keys; may differ from ``query_dim``.
        hidden_dim: width of the hidden layer.

    Attributes:
        query_weight: ``[hidden_dim, query_dim]``.
        key_weight: ``[hidden_dim, key_dim]``.
        output_weight: ``[hidden_dim]``. All three weights are shared by all heads and initialised Xavier-uniform.

    Raises:
        ValueError: a size is below 1, or the width of query or key is wrong.

    Cost: time O(q_len · kv_len · hidden_dim) for the hyperbolic tangents, many times the cost of a dot product.

    Example:
        >>> import torch
        >>> from saccade import attention
        >>> query, key = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 3, 6)
        >>> attention(query, key, key, score=Additive(4, 6, 8)).shape
        torch.Size([1, 1, 2, 6])

    Reference: Bahdanau et al. 2015, arXiv:1409.0473, section A.1.2.
    """

    def __init__(self, query_dim: int, key_dim: int, hidden_dim: int):
        super().__init__()
        hidden_dim = check_int("hidden_dim", hidden_dim)
        self.query_weight = nn.Parameter(torch.empty(hidden_dim, check_int("query_dim", query_dim)))
        self.key_weight = nn.Parameter(torch.empty(hidden_dim, check_int("key_dim", key_dim)))
        self.output_weight = nn.Parameter(torch.empty(hidden_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the additive score's weights from Xavier-uniform distributions."""
        for weight in (self.query_weight, self.key_weight, self.output_weight[None]):
            nn.init.xavier_uniform_(weight)

    @property
    def widths(self) -> tuple[int, int]:
        return self.query_weight.shape[1], self.key_weight.shape[1]

    def prepare(self, query: Tensor, key: Tensor) -> Prepared:
        query, key = widened(query), widened(key)
        weights = (x.to(query.dtype) for x in (self.query_weight, self.key_weight, self.output_weight))
        query_weight, key_weight, output_weight = weights
        return Prepared(query @ query_weight.mT, key @ key_weight.mT, compare, (output_weight,))

    def extra_repr(self) -> str:
        return "query_dim={}, key_dim={}, hidden_dim={}".format(*self.widths, len(self.output_weight))


@dataclasses.dataclass(frozen=True)
class _Compare:
    """The additive score of ``q [..., rows, hidden]`` and ``k [..., columns, hidden]``, weighted by ``v [hidden]``."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))):
            return _scores(q, k, v)
        scores: Tensor = _AdditiveScore.apply(q, k, v)
        return scores

    @staticmethod
    def gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients with respect to q, k and v, given the gradient with respect to the additive scores."""
        gq, gk = torch.zeros_like(q), torch.zeros_like(k)
        wide = widest_dtype(v.device)
        gv = torch.zeros_like(v, dtype=wide)  # a sum over all pairs
        for rows, columns in _blocks_of_pairs(q, k):
            hidden, part = _hidden_layer(q, k, rows, columns), grad[..., rows, columns]
            gv += (part[..., None, :] @ hidden).flatten(0, -2).sum(0, dtype=wide)
            slope = hidden.square_().neg_().add_(1.0)
            gq[..., rows, :] += (part[..., None, :] @ slope)[..., 0, :]
            gk[..., columns, :] += (part[..., None] * slope).sum(-3)
        return gq * v, gk * v, gv.to(v.dtype)

    @staticmethod
    def held_bytes(itemsize: int) -> int:
        """Return the peak memory, in bytes, that the additive score needs beyond its results, however many pairs."""
        return itemsize * _AT_ONCE


compare = _Compare()


def _scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.new_empty(*q.shape[:-1], k.shape[-2])
    for rows, columns in _blocks_of_pairs(q, k):
        scores[..., rows, columns] = _hidden_layer(q, k, rows, columns) @ v
    return scores


class _AdditiveScore(torch.autograd.Function):
    """The autograd function of the additive score. It computes the hidden layer for a few pairs at a time."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return _scores(q, k, v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return _Gradients.apply(*ctx.saved_tensors, grad)


class _Gradients(torch.autograd.Function):
    """The autograd function of the additive score's gradients, which raises an error for second derivatives."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return compare.gradients(grad, q, k, v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        raise unsupported("Additive", ["its hidden layer has no second derivative"])


def _hidden_layer(q: Tensor, k: Tensor, rows: slice, columns: slice) -> Tensor:
    return (q[..., rows, None, :] + k[..., None, columns, :]).tanh_()


def _blocks_of_pairs(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices of rows and columns for which the additive score's hidden layer has about `_AT_ONCE` entries."""
    each = max(1, q.shape[:-2].numel() * q.shape[-1])
    columns = max(1, min(k.shape[-2], 256, _AT_ONCE // each))
    rows = max(1, _AT_ONCE // (each * columns))
    for first in range(0, q.shape[-2], rows):
        for start in range(0, k.shape[-2], columns):
            yield slice(first, first + rows), slice(start, start + columns)
