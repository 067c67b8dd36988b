"""Scorers: which blocks of keys matter for a query, told from a few numbers about each block."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from saccade.support.numerics import wide_dtype

__all__ = ["BlockScorer", "MeanScorer", "BoundScorer"]


class BlockScorer(ABC):
    """Sums up a block of keys once, and says for each query how much it expects of the block.

    A scorer of one's own defines both methods. A score is on the scale of ``query @ key``, before the factor of the
    softmax; it only ranks blocks and is never used as a weight.
    """

    @abstractmethod
    def summarize(self, key: Tensor, real: Tensor) -> Tensor:
        """What is remembered of blocks, ``[batch, kv_heads, blocks, width]``; any width, in any float type.

        Args:
            key: ``[batch, kv_heads, blocks, block_size, head_dim]``.
            real: bool ``[batch | 1, 1, blocks, block_size, 1]``, False where no token stands.
        """

    @abstractmethod
    def score(self, query: Tensor, summary: Tensor) -> Tensor:
        """How much is expected of each block, ``[batch, heads, blocks]``.

        Args:
            query: ``[batch, heads, head_dim]``; head h reads key head ``h // (heads // kv_heads)``.
            summary: ``[batch, kv_heads, blocks, width]``.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class MeanScorer(BlockScorer):
    """The query times the mean key of a block: finds wide, weak matches; a single strong key is diluted.

    Cost: one vector of ``head_dim`` for each block; a product with it for each query.

    Example:
        >>> key = torch.tensor([[1.0, 0.0], [3.0, 0.0]]).view(1, 1, 1, 2, 2)
        >>> MeanScorer().summarize(key, torch.ones(1, 1, 1, 2, 1, dtype=torch.bool))
        tensor([[[[2., 0.]]]])
    """

    def summarize(self, key: Tensor, real: Tensor) -> Tensor:
        total = key.masked_fill(~real, 0.0).sum(3, dtype=wide_dtype(key.dtype))
        return (total / real.sum(3).clamp(min=1)).to(key.dtype)

    def score(self, query: Tensor, summary: Tensor) -> Tensor:
        return _products(query, summary)


class BoundScorer(BlockScorer):
    r"""The most that the query could score with any key of a block, by the range of each channel.

    .. math:: \sum_i \max(q_i \min_j k_{ji},\; q_i \max_j k_{ji}) \;\ge\; \max_j q \cdot k_j

    Never too low, so that a single strong key is not missed; too high for blocks whose keys are unlike one another.

    Cost: two vectors of ``head_dim`` for each block; a product with both for each query.

    Example:
        >>> key = torch.tensor([[1.0, 0.0], [3.0, -2.0]]).view(1, 1, 1, 2, 2)
        >>> scorer = BoundScorer()
        >>> summary = scorer.summarize(key, torch.ones(1, 1, 1, 2, 1, dtype=torch.bool))
        >>> scorer.score(torch.tensor([[[1.0, 1.0]]]), summary)
        tensor([[[3.]]])

    Reference: Tang et al. 2024, arXiv:2406.10774, section 3.2 (Quest).
    """

    def summarize(self, key: Tensor, real: Tensor) -> Tensor:
        low = key.masked_fill(~real, torch.inf).amin(3)
        high = key.masked_fill(~real, -torch.inf).amax(3)
        # A block of padding: nothing is in it, and no product may come out as NaN.
        nobody = ~real.any(3)
        return torch.cat([high.masked_fill(nobody, 0.0), low.masked_fill(nobody, 0.0)], -1)

    def score(self, query: Tensor, summary: Tensor) -> Tensor:
        return _products(torch.cat([query.clamp(min=0), query.clamp(max=0)], -1), summary)


def _products(query: Tensor, summary: Tensor) -> Tensor:
    """``[batch, heads, width]`` times ``[batch, kv_heads, blocks, width]``, each head with its own key head."""
    batch, heads, width = query.shape
    grouped = query.view(batch, summary.shape[1], -1, width).to(wide_dtype(query.dtype))
    return (grouped @ summary.to(grouped.dtype).mT).view(batch, heads, -1)
