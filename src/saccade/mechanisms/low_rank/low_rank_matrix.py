"""LowRankMatrix: two narrow matrices in the place of a large one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from saccade.engine.tiles.grouped_heads import product
from saccade.matrix import Block
from saccade.mechanisms.linear_time import LinearTimeMatrix
from saccade.mechanisms.low_rank.thin_softmax import NarrowSoftmax
from saccade.mechanisms.value_access import unless_none
from saccade.support.torch_modes import without_autocast

__all__ = ["LowRankMatrix"]


class LowRankMatrix(LinearTimeMatrix):
    """``left @ right``: queries by a few slots, and these slots by keys.

    Args:
        left: queries over the slots, ``[batch, heads, q_len, slots]``.
        kv_heads, kv_len: sizes of the right side.
        dtype: of the inputs and of the products.
        lost: bool ``[batch, q_len]``, rows where no token stands.

    Cost: products take O((q_len + kv_len) * slots * width) time and memory linear in the lengths.
    """

    def __init__(self, left: NarrowSoftmax, kv_heads: int, kv_len: int, *, dtype: torch.dtype, lost: Tensor):
        super().__init__((*left.query.shape[:3], kv_len), kv_heads, dtype=dtype, device=left.query.device)
        self.left, self._lost = left, unless_none(lost)

    @property
    def is_stochastic(self) -> bool:
        """False: weights may be below 0, and rows need not sum to 1."""
        return False

    @abstractmethod
    def _gathered(self, value: Tensor) -> Tensor:
        """Return ``right @ value``, the slots' sums of a value: ``[batch, kv_heads or heads, slots, width]``."""

    @abstractmethod
    def _scattered(self, x: Tensor) -> Tensor:
        """Return ``right.mT @ x`` for ``x [batch, heads, slots, width]``."""

    @abstractmethod
    def _right(self, items: slice, heads: slice) -> Tensor:
        """Return the right side of some heads, dense: ``[batch | 1, heads or their groups, slots, kv_len]``."""

    def _times(self, value: Tensor) -> Tensor:
        return self._without_lost(self.left.times(self._gathered(value.to(self.left.query.dtype))))

    def rmatmul(self, x: Tensor) -> Tensor:
        """Return ``A.mT @ x`` in linear time; see `Matrix.rmatmul`."""
        x = self._operand(x, "x", self.shape[1], self.shape[2])
        with without_autocast(self.device):
            rows = self._without_lost(x.to(self.left.query.dtype))
            return self._scattered(self.left.matrix().mT @ rows).to(x.dtype)

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        part: tuple[slice, slice] | None = None
        for items, heads, own in self._pieces(batch, head, rows):
            if part != (items, heads):  # the keys' side is the same for all rows of a head
                part, right = (items, heads), self._right(items, heads)
            left = self.left.weights(items, heads, own)
            weights = product(left, right.expand(len(left), -1, -1, -1))
            if self._lost is not None:
                weights = weights.masked_fill(self._lost[items, None, own.start : own.stop, None], 0.0)
            yield Block(items, heads, own, (range(self.shape[3]),), weights)

    def _without_lost(self, rows: Tensor) -> Tensor:
        return rows if self._lost is None else rows.masked_fill(self._lost[:, None, :, None], 0.0)
