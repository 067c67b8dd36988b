"""LightningIndexer: a few narrow heads that say which keys a query should read."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.mechanisms.scorers.base import Scorer, ScoreRows, exact_dtype
from saccade.support.errors import value_error
from saccade.support.numerics import wide_dtype
from saccade.support.validation import ShapeSpec

__all__ = ["LightningIndexer"]

_SHAPES = ShapeSpec(
    "index_query [batch, index_heads, q_len, dim]",
    "index_key [batch, 1, kv_len, dim]",
    "weight [batch, index_heads, q_len]",
)


class LightningIndexer(Scorer):
    r"""Scores by narrow heads of their own, one choice for all heads of attention (DeepSeek sparse attention).

    .. math:: I_{ts} = (H d)^{-1/2} \sum_{h=1}^{H} w_{th} \max(0,\; q^I_{th} \cdot k^I_s)

    It holds tensors of one call: make it anew for each. The layer's projections make them, and rotate them where they
    are to be; see the recipe in the docs.

    Args:
        index_query: ``[batch, index_heads, q_len, dim]``.
        index_key: ``[batch, 1, kv_len, dim]``: one head.
        weight: of the heads of each query, ``[batch, index_heads, q_len]``.

    Raises:
        TypeError, ValueError: no float tensors of such shapes.

    Cost: ``q_len * kv_len * index_heads * dim`` products in float64, a few rows at a time.

    Example:
        >>> q, k, w = torch.ones(1, 2, 3, 4), torch.ones(1, 1, 3, 4), torch.ones(1, 2, 3)
        >>> LightningIndexer(q, k, w).scores(range(1), 3)
        tensor([[[[2.8284, 2.8284, 2.8284]]]])

    Reference: DeepSeek-AI 2025, DeepSeek-V3.2-Exp, section 2.1.
    """

    def __init__(self, index_query: Tensor, index_key: Tensor, weight: Tensor):
        _SHAPES.check(index_query, index_key, weight)
        self.index_query, self.weight = index_query, weight
        self._index_key = index_key

    @property
    def index_key(self) -> Tensor:
        return self._index_key

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """What gradients of scores may be taken of: index_query, index_key, weight."""
        return self.index_query, self._index_key, self.weight

    def with_index_key(self, index_key: Tensor) -> LightningIndexer:
        return LightningIndexer(self.index_query, index_key, self.weight)

    def on(self, query: Tensor, key: Tensor, block_size: int) -> ScoreRows:
        given = (*query.shape[:1], query.shape[2], key.shape[2])
        own = (len(self.index_query), self.index_query.shape[2], self._index_key.shape[2])
        if own != given:
            hint = "a cache that holds earlier keys is an IndexedCache, which hands on index keys too"
            rule = f"hold {given[0]} items, {given[1]} queries and {given[2]} keys, as the matrix does"
            raise value_error("index tensors", rule, str(own), hint=hint)
        wide = exact_dtype(query.device)
        exact = LightningIndexer(*(x.detach().to(wide) for x in self.leaves))
        return exact.scores

    def scores(self, rows: range, stop: int) -> Tensor:
        """Scores of queries ``rows`` for the first ``stop`` keys, ``[batch, 1, rows, stop]``; differentiable."""
        heads, dim = self.index_query.shape[1], self.index_query.shape[3]
        own, wide = slice(rows.start, rows.stop), wide_dtype(self.index_query.dtype)
        key = self._index_key[:, :, :stop].to(wide).mT
        total: Tensor | None = None
        weight = self.weight[:, :, own].to(wide) * (heads * dim) ** -0.5
        keeps = torch.is_grad_enabled() and any(x.requires_grad for x in self.leaves)
        for head in range(heads):  # one after another: all at once would be as many times the memory
            each = self.index_query[:, head : head + 1, own].to(wide) @ key
            of_rows = weight[:, head, None, :, None]
            if keeps:
                each = each.relu() * of_rows
                total = each if total is None else total + each
            else:
                each = each.relu_().mul_(of_rows)
                total = each if total is None else total.add_(each)
        if total is None:
            total = key.new_zeros(len(key), 1, len(rows), key.shape[3])
        return total
