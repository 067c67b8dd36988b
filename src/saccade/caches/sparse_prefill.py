"""A prompt of which each token reads no more than a step would."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.caches.attend_call import Call
from saccade.caches.kv_cache import check_softmax
from saccade.engine.tiles.stable_topk import strongest
from saccade.masks import Causal
from saccade.matrix import Matrix
from saccade.matrix.block_sparse import selected
from saccade.support.errors import unsupported
from saccade.support.numerics import is_finite, wide_dtype

if TYPE_CHECKING:
    from saccade.caches.block_select import BlockSelectCache

__all__ = ["Selecting", "blocks_of_prompt", "check_prompt", "set_against"]

_ENTRIES = 1 << 21  # scores of blocks at a time


class Selecting(nn.Module):
    """The mechanism of a call, which shows each query the blocks that were chosen for it.

    Args:
        call: what was asked.
        index_of: chooses blocks by queries and all keys; see `saccade.matrix.block_sparse`.
        size: keys of a block.
    """

    def __init__(self, call: Call, index_of: Callable[[Tensor, Tensor], Tensor], size: int):
        super().__init__()
        self.mechanism, self.call, self._index_of, self._size = call.mechanism, call, index_of, size

    def forward(self, query: Tensor, key: Tensor, **where: Any) -> Matrix:
        """The matrix of the chosen blocks."""
        matrix: Any = self.mechanism(query, key, **where)
        check_softmax(matrix, self.call)
        with torch.no_grad():
            index = self._index_of(query, key)
        return selected(matrix, index, self._size)


def check_prompt(call: Call) -> None:
    """Raise unless what each token reads can be told for all of them at once."""
    reasons = []
    if not isinstance(call.kv_positions.given, range):
        reasons.append("it has padding, or positions of its own")
    if type(call.mask) is not Causal:
        reasons.append("its mask is not masks.Causal()")
    if reasons:
        raise unsupported('prompt="sparse"', reasons, hint='prompt="dense", or one token at a time')


def blocks_of_prompt(cache: BlockSelectCache, query: Tensor, summary: Tensor, columns: range) -> Tensor:
    """Blocks that each of some tokens reads, int32 ``[batch, kv_heads, tokens, blocks]`` in ascending order.

    Args:
        cache: says how many, and ranks.
        query: ``[batch, heads, tokens, head_dim]``.
        summary: of all finished blocks, ``[batch, kv_heads, blocks, width]``.
        columns: where the tokens stand among those held.
    """
    batch, heads, tokens, width = query.shape
    kv_heads, finished, size = summary.shape[1], summary.shape[2], cache.block_size
    few, spare = cache.budget // size - 1, -(-columns.stop // size)
    number = torch.arange(finished, device=query.device)
    parts = []
    step = max(1, _ENTRIES // max(1, batch * heads * finished))
    for first in range(0, tokens, step):
        own = query[:, :, first : first + step]
        before = torch.arange(first, first + own.shape[2], device=query.device) + columns.start
        before = before.div_(size, rounding_mode="floor")[:, None]  # finished blocks, and the number of the own one
        scores = cache.scorer.score(own.reshape(batch, -1, width), summary).view(batch, heads, -1, finished)
        scores = scores.to(wide_dtype(query.dtype)) * width**-0.5
        relative = set_against(scores.masked_fill(number >= before, -torch.inf))
        order = relative.unflatten(1, (kv_heads, -1)).amax(2)
        at_ends = (number < cache.sink_blocks) | (number >= before - (cache.local_blocks - 1))
        order = order.masked_fill(at_ends, torch.inf).masked_fill(number >= before, -torch.inf)
        order = F.pad(order, (0, max(0, few - finished)), value=-torch.inf)
        index = strongest(order, few)
        index = index.masked_fill(order.gather(-1, index) == -torch.inf, spare)
        parts.append(torch.cat([index, before.expand(*index.shape[:3], 1)], -1).int().sort(-1).values)
    return torch.cat(parts, 2)


def set_against(scores: Tensor) -> Tensor:
    """Log of a softmax over blocks; a block that holds a NaN comes first, as the dense run reads it."""
    relative = scores.log_softmax(-1)
    if is_finite(relative):
        return relative
    broken = scores.isnan()
    relative = scores.masked_fill(broken, -torch.inf).log_softmax(-1)
    return relative.masked_fill(broken, torch.inf).masked_fill(relative.isnan() & ~broken, -torch.inf)
