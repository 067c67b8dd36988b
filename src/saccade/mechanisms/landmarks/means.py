"""Means of neighbouring tokens."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["segment_means"]


def segment_means(x: Tensor, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Means of equally many neighbours, those that are hidden left out.

    Args:
        x: ``[batch, heads, len, width]``.
        hidden: bool ``[batch, len]``.
        count: most means; an item with fewer tokens has one of each.

    Returns:
        ``[batch, heads, count, width]``, and which of them are means of nothing: bool ``[batch, count]``.
    """
    tokens = (~hidden).sum(1, keepdim=True)
    place = (~hidden).cumsum(1) - 1  # counts tokens only, so that padded items have the means of unpadded ones
    segment = torch.where(tokens > count, place * count // tokens.clamp(min=1), place)
    segment = segment.masked_fill(hidden, count)  # one more, for what is thrown away
    sums = x.new_zeros(*x.shape[:2], count + 1, x.shape[3])
    index = segment[:, None, :, None].expand_as(x)
    sums = sums.scatter_add(2, index, x.masked_fill(hidden[:, None, :, None], 0.0))
    sizes = torch.zeros(len(x), count + 1, dtype=x.dtype, device=x.device)
    sizes = sizes.scatter_add(1, segment, torch.ones_like(segment, dtype=x.dtype))[:, :count]
    return sums[:, :, :count] / sizes.clamp(min=1.0)[:, None, :, None], sizes == 0
