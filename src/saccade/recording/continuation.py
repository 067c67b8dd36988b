"""Whether a call continues where the last one ended, as the steps of a generation do."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.attention import AttentionMatrix
from saccade.engine.chosen import at_positions
from saccade.matrix import Matrix
from saccade.mechanisms.recurrences.matrix import RecurrenceMatrix

__all__ = ["Mark", "place_of_last"]


class Mark(NamedTuple):
    """What is remembered of a call, to recognise the call that continues it.

    Attributes:
        newest: the key of its last token, ``[batch, kv_heads, head_dim]``; None where keys are unknown.
        last: the last key of all, which is another one where a cache has room to spare.
        tokens: how many keys there were up to its last token, of the whole text.
        kv_len: how many keys the call had.
    """

    newest: Tensor | None
    last: Tensor | None
    tokens: int
    kv_len: int

    @classmethod
    def of(cls, matrix: Matrix, first_column: int = 0) -> Mark:
        """The mark of a call whose first key is the one with this number."""
        kv_len, key = matrix.shape[3], _key_of(matrix)
        if key is None or not kv_len:
            return cls(None, None, kv_len, kv_len)
        place = place_of_last(matrix)
        return cls(key[:, :, place].clone(), key[:, :, -1].clone(), first_column + place + 1, kv_len)

    def continued(self, matrix: Matrix) -> int | None:
        """Number of the first key of the next call, if that goes on from this one; else None.

        In self-attention the key of the last token stands before those of the new ones. In cross-attention the keys
        are the same, and one token asks.
        """
        q_len, kv_len, key = matrix.shape[2], matrix.shape[3], _key_of(matrix)
        if self.newest is None or self.last is None or key is None:
            return None
        if q_len >= kv_len or key[:, :, 0].shape != self.newest.shape or key.dtype != self.newest.dtype:
            return None
        place = place_of_last(matrix)
        before = place - q_len
        if before >= 0 and torch.equal(key[:, :, before], self.newest):
            first = self.tokens + q_len - 1 - place
            return first if first >= 0 else None
        is_cross = isinstance(matrix, AttentionMatrix) and q_len == 1 and kv_len == self.kv_len
        if is_cross and torch.equal(key[:, :, -1], self.last):
            return self.tokens - 1 - place if self.tokens - 1 - place >= 0 else 0
        return None


def _key_of(matrix: Matrix) -> Tensor | None:
    """Keys, ``[batch, kv_heads, len, head_dim]``; None where they are unknown."""
    if isinstance(matrix, AttentionMatrix):
        return matrix.ingredients.key.detach()
    key = matrix.key if isinstance(matrix, RecurrenceMatrix) else None
    return None if key is None or not key.shape[2] else key.detach()


def place_of_last(matrix: Matrix) -> int:
    """Which key is that of the last query: the last one, unless a cache has room to spare."""
    if not isinstance(matrix, AttentionMatrix):
        key = _key_of(matrix)
        return matrix.shape[3] - 1 if key is None else key.shape[2] - 1
    kv_len, (q_first, kv_first) = matrix.shape[3], matrix.ingredients.origin
    if at_positions(matrix.ingredients.rule) is not None:
        return kv_len - 1
    place = q_first + matrix.shape[2] - 1 - kv_first
    return place if 0 <= place < kv_len else kv_len - 1
