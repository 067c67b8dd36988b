"""Scorers of individual keys: attention's own dot products, and the narrow heads of a lightning indexer."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine.tiles.grouped_heads import product
from saccade.scorers.scorer import Scorer, ScoreRows, exact_dtype
from saccade.support.errors import value_error
from saccade.support.numerics import wide_dtype
from saccade.support.validation import ShapeSpec

_SCORES = 1 << 18  # number of scores of index heads computed at a time

_INDEX = ShapeSpec(
    "index_query [batch, index_heads, q_len, dim]",
    "index_key [batch, 1, kv_len, dim]",
    "weight [batch, index_heads, q_len]",
)


class DotProducts(Scorer):
    """A scorer that uses the dot product of query and key, so that each head selects keys by its attention scores.

    It saves no computation, but selects the best keys, so it serves as a baseline for other scorers.

    Cost: computes all scores in float64.

    Example:
        >>> x = torch.tensor([[1.0], [3.0]])[None, None]
        >>> DotProducts().on(x, x, 1)(range(1, 2), 2)
        tensor([[[[3., 9.]]]], dtype=torch.float64)
    """

    def on(self, query: Tensor, key: Tensor, block_size: int) -> ScoreRows:
        wide = exact_dtype(query.device)
        keys = key.to(wide)
        return lambda rows, stop: product(query[:, :, rows.start : rows.stop].to(wide), keys[:, :, :stop].mT)


class LightningIndexer(Scorer):
    r"""A scorer with narrow index heads, which selects the same keys for all attention heads (DeepSeek).

    .. math:: I_{ts} = (H d)^{-1/2} \sum_{h=1}^{H} w_{th} \max(0,\; q^I_{th} \cdot k^I_s)

    It stores the tensors of a single call, so construct one for each call. The layer's projections produce these
    tensors, rotated if the layer uses rotary positions; see the recipe in the docs.

    Args:
        index_query: ``[batch, index_heads, q_len, dim]``.
        index_key: ``[batch, 1, kv_len, dim]``: a single head.
        weight: weights of each query's index heads, ``[batch, index_heads, q_len]``.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.

    Cost: ``q_len * kv_len * index_heads * dim`` products in float64, a few rows at a time.

    Example:
        >>> q, k, w = torch.ones(1, 2, 3, 4), torch.ones(1, 1, 3, 4), torch.ones(1, 2, 3)
        >>> LightningIndexer(q, k, w).scores(range(1), 3)
        tensor([[[[2.8284, 2.8284, 2.8284]]]])

    Reference: DeepSeek-AI 2025, DeepSeek-V3.2-Exp, section 2.1.
    """

    def __init__(self, index_query: Tensor, index_key: Tensor, weight: Tensor):
        _INDEX.check(index_query, index_key, weight)
        self.index_query, self.weight = index_query, weight
        self._index_key = index_key

    @property
    def index_key(self) -> Tensor:
        return self._index_key

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tensors that receive gradients from the scores: index_query, index_key, weight."""
        return self.index_query, self._index_key, self.weight

    def with_index_key(self, index_key: Tensor) -> LightningIndexer:
        return LightningIndexer(self.index_query, index_key, self.weight)

    def on(self, query: Tensor, key: Tensor, block_size: int) -> ScoreRows:
        expected = (len(query), query.shape[2], key.shape[2])
        sizes = (len(self.index_query), self.index_query.shape[2], self._index_key.shape[2])
        if sizes != expected:
            hint = "use an IndexedCache, which stores the index keys of earlier tokens"
            rule = f"hold {expected[0]} items, {expected[1]} queries and {expected[2]} keys, as the matrix does"
            raise value_error("index tensors", rule, str(sizes), hint=hint)
        wide = exact_dtype(query.device)
        exact = LightningIndexer(*(x.detach().to(wide) for x in self.leaves))
        return exact.scores

    def scores(self, rows: range, stop: int) -> Tensor:
        """Return differentiable scores of the first ``stop`` keys for queries ``rows``, ``[batch, 1, rows, stop]``."""
        heads, dim = self.index_query.shape[1], self.index_query.shape[3]
        of_rows, wide = slice(rows.start, rows.stop), wide_dtype(self.index_query.dtype)
        key = self._index_key[:, 0, :stop].to(wide).mT
        total: Tensor | None = None
        weight = self.weight[:, :, of_rows].to(wide) * (heads * dim) ** -0.5
        needs_graph = torch.is_grad_enabled() and any(x.requires_grad for x in self.leaves)
        step = max(1, _SCORES // max(1, len(key) * len(rows) * key.shape[2]))  # index heads at a time
        for first in range(0, heads, step):
            some = slice(first, first + step)
            query, weights = self.index_query[:, some, of_rows].to(wide), weight[:, some, :, None]
            scores = (query.flatten(1, 2) @ key).unflatten(1, query.shape[1:3])
            scores = scores.relu() * weights if needs_graph else scores.relu_().mul_(weights)
            part = scores.sum(1, keepdim=True)
            total = part if total is None else total + part
        return key.new_zeros(len(key), 1, len(rows), key.shape[2]) if total is None else total
