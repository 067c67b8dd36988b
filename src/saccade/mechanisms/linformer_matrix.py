"""LinformerMatrix: attention to slots, and what the slots hold of the keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from saccade.engine.grouping import groups_of, product
from saccade.matrix import Block
from saccade.mechanisms.linear_time_matrix import LinearTimeMatrix
from saccade.mechanisms.row_blocks import row_blocks
from saccade.mechanisms.thin import Thin

__all__ = ["LinformerMatrix"]


class LinformerMatrix(LinearTimeMatrix):
    """``slots @ projection``: which slots a query attends to, and which keys each slot takes its values from.

    Args:
        attention: queries over the pooled keys, ``[batch, heads, q_len, rank]``.
        projection: of values to slots, ``[batch | 1, kv_heads | 1, rank, kv_len]``; 0 at keys that are hidden.
        dtype: of the inputs and of the products.
        hidden: bool ``[batch, kv_len]``, keys that nobody sees.
        lost: bool ``[batch, q_len]``, rows where no token stands; None for none.

    Cost: products take O((q_len + kv_len) * rank * width) time and memory linear in the lengths.
    """

    def __init__(self, attention: Thin, projection: Tensor, *, dtype: torch.dtype, hidden: Tensor, lost: Tensor | None):
        super().__init__(dtype)
        self._attention, self.projection, self._hidden, self._lost = attention, projection, hidden, lost

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (*self._attention.query.shape[:3], self.projection.shape[3])

    @property
    def device(self) -> torch.device:
        return self.projection.device

    @property
    def kv_heads(self) -> int:
        return self._attention.key.shape[1]

    @property
    def is_stochastic(self) -> bool:
        """False: slots mix keys with factors of any sign and sum."""
        return False

    def slots(self) -> Tensor:
        """How much each query attends to each slot, ``[batch, heads, q_len, rank]``; these rows sum to 1."""
        return self._without_lost(self._attention.matrix().to_dense())

    def _times(self, value: Tensor) -> Tensor:
        seen = value.to(self.projection.dtype).masked_fill(self._hidden[:, None, :, None], 0.0)
        return self._without_lost(self._attention.times(self.projection @ seen))

    def rmatmul(self, x: Tensor) -> Tensor:
        """``A.mT @ x`` in linear time; see `Matrix.rmatmul`."""
        x = self._operand(x, "x", self.shape[1], self.shape[2])
        with torch.autocast(self.device.type, enabled=False):
            slots = self._attention.matrix().mT @ self._without_lost(x.to(self.projection.dtype))
            projection = self.projection
            if projection.shape[1] > 1:
                projection = projection.repeat_interleave(self.shape[1] // projection.shape[1], 1)
            return (projection.mT @ slots).to(x.dtype)

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        self._check_part(batch, head, rows)
        for items, heads, own in row_blocks(self.shape, batch, head, rows):
            projection = self.projection if len(self.projection) == 1 else self.projection[items]
            if projection.shape[1] > 1:
                projection = projection[:, groups_of(heads, self.shape[1], self.kv_heads)]
            slots = self._attention.weights(items, heads, own)
            weights = product(slots, projection.expand(len(slots), -1, -1, -1))
            if self._lost is not None:
                weights = weights.masked_fill(self._lost[items, None, own.start : own.stop, None], 0.0)
            yield Block(items, heads, own, (range(self.shape[3]),), weights)

    def _without_lost(self, rows: Tensor) -> Tensor:
        return rows if self._lost is None else rows.masked_fill(self._lost[:, None, :, None], 0.0)
