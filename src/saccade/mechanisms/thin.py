"""Thin: softmax attention with few rows or few columns."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from saccade.attention_matrix import AttentionMatrix
from saccade.grouping import groups_of, product

__all__ = ["Thin"]


class Thin(NamedTuple):
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
        """As a lazy matrix."""
        mask = ~self.hidden[:, None, None] if bool(self.hidden.any()) else None
        return AttentionMatrix(self.query, self.key, mask, scale=self.scale)

    def weights(self, items: slice, heads: slice, rows: range) -> Tensor:
        """Some rows, written out."""
        groups = groups_of(heads, self.query.shape[1], self.key.shape[1])
        scores = product(self.query[items, heads, rows.start : rows.stop], self.key[items, groups].mT) * self.scale
        hidden = self.hidden[items, None, None]
        return scores.masked_fill(hidden, -math.inf).softmax(-1).masked_fill(hidden, 0.0)
