"""Block scorers, which summarize each block of keys once and score the summaries: by means (MoBA) or bounds (Quest)."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.scorers.scorer import Scorer, ScoreRows, exact_dtype
from saccade.support.numerics import wide_dtype
from saccade.support.validation import ShapeSpec

_SUMMARY, _SCORES = ShapeSpec("summary [batch, kv_heads, blocks, width]"), ShapeSpec("scores [batch, heads, blocks]")
_ENTRIES = 1 << 22  # key entries that are converted to a wider dtype at a time


class BlockScorer(Scorer):
    """Base class of block scorers, which summarize each block of keys once and score the summary for each query.

    A custom scorer defines `summarize` and `score`. A score is on the scale of ``query @ key``, before the softmax
    scale. It only ranks blocks and is never used as a weight.

    For query t, the block that contains key ``kv_len - q_len + t`` (its own key in self-attention) is always selected.
    """

    @abstractmethod
    def summarize(self, key: Tensor, real: Tensor) -> Tensor:
        """Return one summary per block of keys, ``[batch, kv_heads, blocks, width]``, of any width and float dtype.

        Args:
            key: ``[batch, kv_heads, blocks, block_size, head_dim]``.
            real: bool ``[batch | 1, 1, blocks, block_size, 1]``, False at padding.
        """

    @abstractmethod
    def score(self, query: Tensor, summary: Tensor) -> Tensor:
        """Return the score of each block, ``[batch, heads, blocks]``.

        Args:
            query: ``[batch, heads, head_dim]``; head h reads key head ``h // (heads // kv_heads)``.
            summary: ``[batch, kv_heads, blocks, width]``.
        """

    def on(self, query: Tensor, key: Tensor, block_size: int) -> ScoreRows:
        wide, offset = exact_dtype(query.device), key.shape[2] - query.shape[2]
        step = block_size * max(1, _ENTRIES // max(1, block_size * key[:, :, :1].numel()))
        parts = [_summary_of_columns(self, part.to(wide), block_size) for part in key.split(step, 2)]
        summary = torch.cat(parts, 2)

        def score(rows: range, stop: int) -> Tensor:
            count = -(-stop // block_size)
            scores = score_rows(self, query[:, :, rows.start : rows.stop].to(wide), summary[:, :, :count])
            block = torch.arange(rows.start + offset, rows.stop + offset, device=query.device)
            block = block.div(block_size, rounding_mode="floor")[:, None]
            return scores.masked_fill(block == torch.arange(count, device=query.device), math.inf)

        return score


class BlockMeans(BlockScorer):
    r"""A block scorer that uses the mean key of a block. It finds broad, weak matches but dilutes a single strong key.

    .. math:: I_{tj} = q_t \cdot \frac{1}{|B_j|} \sum_{s \in B_j} k_s

    In `saccade.mechanisms.TopK`, each head selects its own blocks. Blocks that are only partly visible to a query are
    always selected and not ranked, since masked keys would affect their scores.

    Cost: one pass over the keys, one vector of ``head_dim`` for each block, and a dot product per query and block.

    Example:
        >>> key = torch.tensor([[1.0, 0.0], [3.0, 0.0]]).view(1, 1, 1, 2, 2)
        >>> BlockMeans().summarize(key, torch.ones(1, 1, 1, 2, 1, dtype=torch.bool))
        tensor([[[[2., 0.]]]])
        >>> x = torch.tensor([[2.0], [0.0], [5.0], [1.0], [0.0], [1.0]])[None, None]
        >>> BlockMeans().on(x, x, 2)(range(5, 6), 6)
        tensor([[[[1., 3., inf]]]], dtype=torch.float64)

    Reference: Lu et al. 2025, arXiv:2502.13189, section 2.2 (MoBA).
    """

    def summarize(self, key: Tensor, real: Tensor) -> Tensor:
        total = key.masked_fill(~real, 0.0).sum(3, dtype=wide_dtype(key.dtype))
        return (total / real.sum(3).clamp(min=1)).to(key.dtype)

    def score(self, query: Tensor, summary: Tensor) -> Tensor:
        return _products(query, summary)


class BlockBounds(BlockScorer):
    r"""A block scorer that computes an upper bound on a query's scores in a block from the range of each channel.

    .. math:: \sum_i \max(q_i \min_j k_{ji},\; q_i \max_j k_{ji}) \;\ge\; \max_j q \cdot k_j

    The bound is never too low, so a single strong key is not missed. If the keys of a block differ a lot, it is too
    high.

    Cost: two vectors of ``head_dim`` for each block, and two dot products per query and block.

    Example:
        >>> key = torch.tensor([[1.0, 0.0], [3.0, -2.0]]).view(1, 1, 1, 2, 2)
        >>> scorer = BlockBounds()
        >>> summary = scorer.summarize(key, torch.ones(1, 1, 1, 2, 1, dtype=torch.bool))
        >>> scorer.score(torch.tensor([[[1.0, 1.0]]]), summary)
        tensor([[[3.]]])

    Reference: Tang et al. 2024, arXiv:2406.10774, section 3.2 (Quest).
    """

    def summarize(self, key: Tensor, real: Tensor) -> Tensor:
        low = key.masked_fill(~real, torch.inf).amin(3)
        high = key.masked_fill(~real, -torch.inf).amax(3)
        # A block of padding has no range. Use zeros, so that no product is NaN.
        is_padding = ~real.any(3)
        return torch.cat([high.masked_fill(is_padding, 0.0), low.masked_fill(is_padding, 0.0)], -1)

    def score(self, query: Tensor, summary: Tensor) -> Tensor:
        return _products(torch.cat([query.clamp(min=0), query.clamp(max=0)], -1), summary)


def summarize_blocks(scorer: BlockScorer, key: Tensor, real: Tensor) -> Tensor:
    """Call `BlockScorer.summarize` for some blocks and check the shape of the summaries."""
    summary = scorer.summarize(key, real)
    batch, kv_heads, blocks = key.shape[:3]
    _SUMMARY.check(summary, batch=batch, kv_heads=kv_heads, blocks=blocks)
    return summary


def score_rows(scorer: BlockScorer, query: Tensor, summary: Tensor) -> Tensor:
    """Call `BlockScorer.score` for several rows and check the shape; return ``[batch, heads, rows, blocks]``.

    Args:
        scorer: the scorer of the blocks.
        query: ``[batch, heads, rows, head_dim]``.
        summary: ``[batch, kv_heads, blocks, width]``.
    """
    batch, heads, rows, _ = query.shape
    scores = scorer.score(query.flatten(1, 2), summary)  # rows become separate heads with the same key head
    _SCORES.check(scores, batch=batch, heads=heads * rows, blocks=summary.shape[2])
    return scores.unflatten(1, (heads, rows))


def _summary_of_columns(scorer: BlockScorer, key: Tensor, size: int) -> Tensor:
    """Summarize the blocks of ``key [batch, kv_heads, columns, head_dim]``, whose last block may be shorter."""
    columns = key.shape[2]
    count = -(-columns // size)
    real = torch.arange(count * size, device=key.device) < columns
    blocks = F.pad(key, (0, 0, 0, count * size - columns)).unflatten(2, (count, size))
    return summarize_blocks(scorer, blocks, real.view(1, 1, count, size, 1))


def _products(query: Tensor, summary: Tensor) -> Tensor:
    """Return block scores: dot products of ``[batch, heads, width]`` with ``[batch, kv_heads, blocks, width]``."""
    batch, heads, width = query.shape
    grouped = query.view(batch, summary.shape[1], -1, width).to(wide_dtype(query.dtype))
    return (grouped @ summary.to(grouped.dtype).mT).view(batch, heads, -1)
