"""BlockMeanMatrix: attention to the means of key blocks, as a matrix over the keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.matrix import AttentionMatrix, Block
from saccade.mechanisms.linear_time import LinearTimeMatrix
from saccade.plan import Ranges
from saccade.support.numerics import wide_dtype
from saccade.support.torch_modes import without_autocast


def block_means(x: Tensor, size: int) -> Tensor:
    """Return the mean of each complete block of tokens, ``[batch, heads, len // size, width]``.

    Args:
        x: ``[batch, heads, len, width]``.
        size: number of tokens in a block.
    """
    count = x.shape[2] // size
    return x[:, :, : count * size].unflatten(2, (count, size)).mean(3, dtype=wide_dtype(x.dtype)).to(x.dtype)


class BlockMeanMatrix(LinearTimeMatrix):
    """Attention to the means of key blocks. The keys of a block share its weight equally.

    Args:
        attention: attention from queries to the means of the complete blocks, ``[batch, heads, q_len, blocks]``.
        size: number of keys in a block.
        kv_len: number of keys; those after the last complete block have no weight.
        start: position of the first query; keys begin at position 0.

    Cost: a product reads all values once, and multiplies their block means by ``attention``.
    """

    def __init__(self, attention: AttentionMatrix, size: int, kv_len: int, start: int):
        shape = (*attention.shape[:3], kv_len)
        super().__init__(shape, attention.kv_heads, dtype=attention.dtype, device=attention.device)
        self.attention, self.size, self.start = attention, size, start

    def _times(self, value: Tensor) -> Tensor:
        return self.attention.matmul(block_means(value, self.size))

    def rmatmul(self, x: Tensor) -> Tensor:
        """Return ``A.mT @ x``, computed with one product over blocks; see `Matrix.rmatmul`."""
        x = self._operand(x, "x", self.shape[1], self.shape[2])
        with without_autocast(self.device):
            return self._over_keys(self.attention.rmatmul(x).mT).mT.to(x.dtype)

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        for items, heads, span in self._pieces(batch, head, rows):
            weights = self.attention[items, heads, span.start : span.stop]
            yield Block(items, heads, span, (range(self.shape[3]),), self._over_keys(weights))

    def positions(self, rows: range, columns: Ranges) -> tuple[Tensor, Tensor]:
        _, kv = super().positions(rows, columns)
        q = torch.arange(rows.start + self.start, rows.stop + self.start, rows.step, device=self.device)
        return q[None, None, :, None], kv

    def _over_keys(self, weights: Tensor) -> Tensor:
        """Distribute the weight of each block, ``[..., blocks]``, equally over its keys, ``[..., kv_len]``."""
        each = (weights / self.size).repeat_interleave(self.size, -1)
        return F.pad(each, (0, self.shape[3] - each.shape[-1]))
