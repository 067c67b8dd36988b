"""Whether a call continues where the last one ended, as the steps of a generation do."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.block_sparse.selected_blocks import at_positions
from saccade.matrix import AttentionMatrix, Matrix
from saccade.mechanisms.recurrences.recurrence_matrix import RecurrenceMatrix


class Mark(NamedTuple):
    """The end of a call, by which the call that continues it is recognised.

    Attributes:
        newest: the key of its last token, ``[batch, kv_heads, head_dim]``; None where keys are unknown.
        last: the last key of all, which is another one where a cache has room to spare.
        tokens: how many keys there were up to its last token, of the whole text.
        kv_len: how many keys the call had.
        position: the position of its last query; None where each item has positions of its own.
    """

    newest: Tensor | None
    last: Tensor | None
    tokens: int
    kv_len: int
    position: int | None

    @classmethod
    def of(cls, matrix: Matrix, first_column: int = 0) -> Mark:
        """The mark of a call whose first key is the one with this number."""
        kv_len, key = matrix.shape[3], _key_of(matrix)
        if key is None or not kv_len:
            return cls(None, None, kv_len, kv_len, None)
        place = place_of_last(matrix)
        newest, last = key[:, :, place].clone(), key[:, :, -1].clone()
        return cls(newest, last, first_column + place + 1, kv_len, _position_of_last(matrix))

    def extended(self, matrix: Matrix) -> int | None:
        """Return the number of the first key of the next call if that call adds keys to those of this one; else None.

        In self-attention the key of the last token is directly before the keys of the new tokens.
        """
        q_len, key = matrix.shape[2], _key_of(matrix)
        if self.newest is None or key is None or q_len >= matrix.shape[3] or not self._is_alike(key):
            return None
        place = place_of_last(matrix)
        before = place - q_len
        if before < 0 or not torch.equal(key[:, :, before], self.newest):
            return None
        if torch.equal(key[:, :, place], self.newest) and not self._is_before(matrix):
            return None  # all keys are equal, so that they do not tell whether there is a new one
        first = self.tokens + q_len - 1 - place
        return first if first >= 0 else None

    def repeated(self, matrix: Matrix) -> int | None:
        """Return the number of the first key of the next call if that call has the same keys; else None.

        So it is in cross-attention, where only the queries go on.
        """
        key = _key_of(matrix)
        if self.last is None or key is None or matrix.shape[3] != self.kv_len or not self._is_alike(key):
            return None
        if not (isinstance(matrix, AttentionMatrix) and torch.equal(key[:, :, -1], self.last)):
            return None
        return max(self.tokens - 1 - place_of_last(matrix), 0)

    def _is_alike(self, key: Tensor) -> bool:
        assert self.newest is not None
        return key[:, :, 0].shape == self.newest.shape and key.dtype == self.newest.dtype

    def _is_before(self, matrix: Matrix) -> bool:
        """Whether the last query of a call is at a later position, or has more keys."""
        position = _position_of_last(matrix)
        has_moved = self.position is not None and position is not None and position > self.position
        return has_moved or matrix.shape[3] > self.kv_len


def _key_of(matrix: Matrix) -> Tensor | None:
    """Keys, ``[batch, kv_heads, len, head_dim]``; None where they are unknown."""
    if isinstance(matrix, AttentionMatrix):
        return matrix.inputs.key.detach()
    key = matrix.key if isinstance(matrix, RecurrenceMatrix) else None
    return None if key is None or not key.shape[2] else key.detach()


def _position_of_last(matrix: Matrix) -> int | None:
    if not isinstance(matrix, AttentionMatrix) or at_positions(matrix.inputs.rule) is not None:
        return None
    return matrix.inputs.origin[0] + matrix.shape[2] - 1


def place_of_last(matrix: Matrix) -> int:
    """Return the index of the last query's key: the last one, unless a cache has room to spare."""
    if not isinstance(matrix, AttentionMatrix):
        key = _key_of(matrix)
        return matrix.shape[3] - 1 if key is None else key.shape[2] - 1
    kv_len, (q_first, kv_first) = matrix.shape[3], matrix.inputs.origin
    if at_positions(matrix.inputs.rule) is not None:
        return kv_len - 1
    place = q_first + matrix.shape[2] - 1 - kv_first
    return place if 0 <= place < kv_len else kv_len - 1
