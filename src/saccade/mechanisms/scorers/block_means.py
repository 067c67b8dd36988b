"""BlockMeans: a query times the mean key of a block."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from saccade.engine.tiles.grouped_heads import product
from saccade.mechanisms.scorers.base import Scorer, ScoreRows, exact_dtype

__all__ = ["BlockMeans"]


class BlockMeans(Scorer):
    r"""The query times the mean of a block's keys; the query's own block is always chosen.

    .. math:: I_{tj} = q_t \cdot \frac{1}{|B_j|} \sum_{s \in B_j} k_s

    Each head chooses for itself. The own block is that of column ``kv_len - q_len + t``, where token t's own key stands
    in self-attention, with and without a cache. Blocks that a query sees only in part are not ranked, since hidden keys
    would have a say in that: `saccade.mechanisms.TopK` always reads them.

    Cost: one pass over the keys; then a product of ``head_dim`` for each query and block.

    Example:
        >>> x = torch.tensor([[2.0], [0.0], [5.0], [1.0], [0.0], [1.0]])[None, None]
        >>> BlockMeans().on(x, x, 2)(range(5, 6), 6)
        tensor([[[[1., 3., inf]]]], dtype=torch.float64)

    Reference: Lu et al. 2025, arXiv:2502.13189, section 2.2 (MoBA).
    """

    def on(self, query: Tensor, key: Tensor, block_size: int) -> ScoreRows:
        wide, (kv_len, first) = exact_dtype(query.device), (key.shape[2], key.shape[2] - query.shape[2])
        whole = kv_len // block_size
        means = key[:, :, : whole * block_size].unflatten(2, (whole, block_size)).mean(3, dtype=wide)
        if kv_len > whole * block_size:
            means = torch.cat([means, key[:, :, whole * block_size :].mean(2, keepdim=True, dtype=wide)], 2)

        def score(rows: range, stop: int) -> Tensor:
            count = -(-stop // block_size)
            scores = product(query[:, :, rows.start : rows.stop].to(wide), means[:, :, :count].mT)
            own = torch.arange(rows.start + first, rows.stop + first, device=query.device)
            own = own.div(block_size, rounding_mode="floor")[:, None]
            return scores.masked_fill_(own == torch.arange(count, device=query.device), math.inf)

        return score
