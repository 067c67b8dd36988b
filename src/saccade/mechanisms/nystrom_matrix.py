"""NystromMatrix: three thin matrices in the place of a large one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from saccade.matrix import Block
from saccade.mechanisms.linear_time_matrix import LinearTimeMatrix
from saccade.mechanisms.row_blocks import row_blocks
from saccade.mechanisms.thin import Thin

__all__ = ["NystromMatrix"]


class NystromMatrix(LinearTimeMatrix):
    """``left @ inner @ right``: queries by landmarks, landmarks by landmarks, landmarks by keys.

    Args:
        left: queries over the keys' landmarks, ``[batch, heads, q_len, landmarks]``.
        inner: ``[batch, heads, landmarks, landmarks]``, the pseudo-inverse.
        right: the queries' landmarks over the keys, ``[batch, heads, landmarks, kv_len]``.
        dtype: of the inputs and of the products.
        lost: bool ``[batch, q_len]``, rows where no token stands; None for none.

    Cost: products take O((q_len + kv_len) * landmarks * width) time and memory linear in the lengths.
    """

    def __init__(self, left: Thin, inner: Tensor, right: Thin, *, dtype: torch.dtype, lost: Tensor | None):
        super().__init__(dtype)
        self.left, self.inner, self.right, self._lost = left, inner, right, lost

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (*self.left.query.shape[:3], self.right.key.shape[2])

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def kv_heads(self) -> int:
        return self.right.key.shape[1]

    @property
    def is_stochastic(self) -> bool:
        """False: rows sum to 1 at best, and weights may be below 0."""
        return False

    def _times(self, value: Tensor) -> Tensor:
        return self._without_lost(self.left.times(self.inner @ self.right.times(value.to(self.inner.dtype))))

    def rmatmul(self, x: Tensor) -> Tensor:
        """``A.mT @ x`` in linear time; see `Matrix.rmatmul`."""
        x = self._operand(x, "x", self.shape[1], self.shape[2])
        with torch.autocast(self.device.type, enabled=False):
            rows = self._without_lost(x.to(self.inner.dtype))
            out = self.right.matrix().mT @ (self.inner.mT @ (self.left.matrix().mT @ rows))
        return out.to(x.dtype)

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        self._check_part(batch, head, rows)
        kept: tuple[slice, slice] | None = None
        for items, heads, own in row_blocks(self.shape, batch, head, rows):
            if kept != (items, heads):  # the keys' side is the same for all rows of a head
                landmarks = range(self.inner.shape[2])
                kept, right = (items, heads), self.inner[items, heads] @ self.right.weights(items, heads, landmarks)
            weights = self.left.weights(items, heads, own) @ right
            if self._lost is not None:
                weights = weights.masked_fill(self._lost[items, None, own.start : own.stop, None], 0.0)
            yield Block(items, heads, own, (range(self.shape[3]),), weights)

    def _without_lost(self, rows: Tensor) -> Tensor:
        return rows if self._lost is None else rows.masked_fill(self._lost[:, None, :, None], 0.0)
