"""NarrowSoftmax: softmax attention with few rows or few columns."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from saccade.engine.tiles.grouped_heads import groups_of, product
from saccade.matrix import AttentionMatrix
from saccade.mechanisms.value_access import is_readable

__all__ = ["NarrowSoftmax"]


class NarrowSoftmax(NamedTuple):
    """Softmax attention in which queries or keys are few: slots, or landmarks.

    Attributes:
        query: ``[batch, heads, rows, head_dim]``.
        key: ``[batch, heads or kv_heads, columns, head_dim]``.
        hidden: bool ``[batch, columns]``, columns that nobody attends to.
        scale: of the dot products.
    """

    query: Tensor
    key: Tensor
    hidden: Tensor
    scale: float

    def matrix(self) -> AttentionMatrix:
        """Return the softmax as a lazy matrix."""
        if is_readable(self.hidden):
            mask = ~self.hidden[:, None, None] if bool(self.hidden.any()) else None
            return AttentionMatrix(self.query, self.key, mask, scale=self.scale)
        # A mask that tells batch items apart cannot be mapped; a term can.
        bias = self.query.new_zeros(self.hidden.shape).masked_fill(self.hidden, -math.inf)
        return AttentionMatrix(self.query, self.key, bias=bias[:, None, None], scale=self.scale)

    def times(self, value: Tensor) -> Tensor:
        """Return the product with a value; hidden columns take no part, whatever they hold."""
        if not is_readable(self.hidden):
            value = value.masked_fill(self.hidden[:, None, :, None], 0.0)  # the term makes a weight 0, and 0 * NaN NaN
        return self.matrix().matmul(value)  # a compiler takes "@" for a product of tensors

    def weights(self, items: slice, heads: slice, rows: range) -> Tensor:
        """Return some rows, dense."""
        groups = groups_of(heads, self.query.shape[1], self.key.shape[1])
        scores = product(self.query[items, heads, rows.start : rows.stop], self.key[items, groups].mT) * self.scale
        hidden = self.hidden[items, None, None]
        return scores.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(hidden, 0.0)
