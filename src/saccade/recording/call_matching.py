"""Match each recorded call to the earlier call that it continues, as in the decoding steps of a generation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from saccade.engine.block_sparse.selected_blocks_mask import at_positions
from saccade.matrix import AttentionMatrix, Matrix
from saccade.mechanisms.recurrences.recurrence_matrix import RecurrenceMatrix
from saccade.recording.derived_matrices import matrix_of_call
from saccade.support.errors import UnsupportedError

if TYPE_CHECKING:
    from saccade.recording.layer_record import Run


class CallEnd(NamedTuple):
    """The last token and key of a recorded call, for recognising a later call that continues it.

    Attributes:
        newest: the key of the last token, ``[batch, kv_heads, head_dim]``; None if keys are unknown.
        last: the last key of the call; it differs from ``newest`` if the cache has free slots.
        first_column: index of the call's first key in the full sequence.
        tokens: number of keys in the full sequence up to the last token.
        kv_len: number of keys in the call.
        position: position of the last query; None if batch items have different positions.
    """

    newest: Tensor | None
    last: Tensor | None
    first_column: int
    tokens: int
    kv_len: int
    position: int | None

    @classmethod
    def of(cls, matrix: Matrix, first_column: int = 0) -> CallEnd:
        """Return the `CallEnd` of a call, given its matrix and the index of its first key in the full sequence."""
        matrix = matrix_of_call(matrix)
        kv_len, key = matrix.shape[3], _key_of(matrix)
        if key is None or not kv_len:
            return cls(None, None, first_column, kv_len, kv_len, None)
        index = index_of_last_key(matrix)
        newest, last = key[:, :, index].clone(), key[:, :, -1].clone()
        return cls(newest, last, first_column, first_column + index + 1, kv_len, _position_of_last(matrix))

    def extended(self, matrix: Matrix) -> int | None:
        """Return the index of a later call's first key in the full sequence; None if it does not extend this call.

        In self-attention, the key of this call's last token comes directly before the keys of the new tokens.
        """
        matrix = matrix_of_call(matrix)
        q_len, key = matrix.shape[2], _key_of(matrix)
        if self.newest is None or key is None or q_len >= matrix.shape[3] or not self._is_alike(key):
            return None
        index = index_of_last_key(matrix)
        before = index - q_len
        if before < 0 or not torch.equal(key[:, :, before], self.newest):
            return None
        if torch.equal(key[:, :, index], self.newest) and not self._is_before(matrix):
            return None  # all keys are equal, so it is unknown whether one is new
        first = self.tokens + q_len - 1 - index
        return first if first >= 0 else None

    def repeated(self, matrix: Matrix) -> int | None:
        """Return the index of a later call's first key in the full sequence; None if that call has other keys.

        In cross-attention, the keys stay the same, and each decoding step has only new queries.
        """
        matrix = matrix_of_call(matrix)
        key = _key_of(matrix)
        if self.last is None or key is None or matrix.shape[3] != self.kv_len or not self._is_alike(key):
            return None
        if not (isinstance(matrix, AttentionMatrix) and torch.equal(key[:, :, -1], self.last)):
            return None
        return self.first_column

    def _is_alike(self, key: Tensor) -> bool:
        assert self.newest is not None
        return key[:, :, 0].shape == self.newest.shape and key.dtype == self.newest.dtype

    def _is_before(self, matrix: Matrix) -> bool:
        """Return whether this call precedes another one, whose last query is later or which has more keys."""
        position = _position_of_last(matrix)
        has_moved = self.position is not None and position is not None and position > self.position
        return has_moved or matrix.shape[3] > self.kv_len


def _key_of(matrix: Matrix) -> Tensor | None:
    """Return the keys of a call's matrix, ``[batch, kv_heads, len, head_dim]``; None if they are unknown."""
    if isinstance(matrix, AttentionMatrix):
        return matrix.inputs.key.detach()
    key = matrix.key if isinstance(matrix, RecurrenceMatrix) else None
    return None if key is None or not key.shape[2] else key.detach()


def _position_of_last(matrix: Matrix) -> int | None:
    if not isinstance(matrix, AttentionMatrix) or at_positions(matrix.inputs.rule) is not None:
        return None
    return matrix.inputs.origin[0] + matrix.shape[2] - 1


def index_of_last_key(matrix: Matrix) -> int:
    """Return the index of the key at the last query's position: the last key, unless the cache has free slots."""
    if not isinstance(matrix, AttentionMatrix):
        key = _key_of(matrix)
        return matrix.shape[3] - 1 if key is None else key.shape[2] - 1
    kv_len, (q_first, kv_first) = matrix.shape[3], matrix.inputs.origin
    if at_positions(matrix.inputs.rule) is not None:
        return kv_len - 1
    index = q_first + matrix.shape[2] - 1 - kv_first
    return index if 0 <= index < kv_len else kv_len - 1


_REMEMBERED = 64  # maximum number of threads per layer; if there are more, the oldest is dropped


class CallEnds:
    """For each layer and thread, the `CallEnd` of the last call, to recognise later calls that continue it.

    A call continues a run if it adds keys to those of the run's last call. Cross-attention adds no keys, so a call with
    the same keys continues a run only during a generation, that is, if the preceding self-attention call in the same
    thread continued a run. Without this condition, two passes over the same input would be merged into one run.

    This class is not thread-safe, so the collector holds a lock while using it.
    """

    def __init__(self) -> None:
        # For each layer, each thread's last call, newest last. Unselected layers have no runs.
        self._ends: dict[str, dict[int, tuple[Run | None, CallEnd]]] = {}
        self._is_step: dict[int, bool] = {}
        self._skipped: dict[int, tuple[str, Callable[[], Matrix]]] = {}

    def skip(self, name: str, make: Callable[[], Matrix]) -> None:
        """Store a call to an unselected layer, because it may reveal that the thread is generating tokens."""
        self._skipped[threading.get_ident()] = (name, make)

    def forget_skipped(self) -> None:
        """Discard the stored calls to unselected layers."""
        self._skipped.clear()

    def continued(self, name: str, matrix: Matrix) -> tuple[Run | None, int]:
        """Return the run that a call continues, and the index of the call's first key in that run.

        Runs of the same thread are preferred. If the call continues no run, the run is None.
        """
        thread_id = threading.get_ident()
        skipped = self._skipped.pop(thread_id, None)
        run, first_column = self._match(name, matrix, lambda call_end: call_end.extended(matrix))
        if run is None and skipped is not None and matrix.shape[2] != matrix.shape[3]:
            self._match_skipped(*skipped)
        if run is None and self._is_step.get(thread_id):
            run, first_column = self._match(name, matrix, lambda call_end: call_end.repeated(matrix))
        self._is_step[thread_id] = run is not None
        return run, first_column

    def end(self, name: str, run: Run | None, matrix: Matrix, first_column: int) -> None:
        """Store the end of a layer's call, so that the layer's next call can be recognised as a continuation."""
        ends = self._ends.setdefault(name, {})
        ends.pop(threading.get_ident(), None)
        ends[threading.get_ident()] = (run, CallEnd.of(matrix, first_column))
        for oldest in [*ends][:-_REMEMBERED]:
            del ends[oldest]

    def _match_skipped(self, name: str, make: Callable[[], Matrix]) -> None:
        """Determine whether the stored call to an unselected layer is part of a generation."""
        thread_id = threading.get_ident()
        try:
            matrix = make()
        except UnsupportedError:  # without a matrix, nothing can be determined
            return
        first_columns = (call_end.extended(matrix) for _, call_end in self._ends.get(name, {}).values())
        first_column = next((first for first in first_columns if first is not None), None)
        self._is_step[thread_id] = first_column is not None
        self.end(name, None, matrix, first_column or 0)

    def _match(self, name: str, matrix: Matrix, first_of: Callable[[CallEnd], int | None]) -> tuple[Run | None, int]:
        ends = self._ends.get(name, {})
        newest_first = [*reversed(ends)]
        for thread in sorted(newest_first, key=lambda thread: thread != threading.get_ident()):
            run, call_end = ends[thread]
            first_column = first_of(call_end) if run is not None and run._can_continue(matrix) else None
            if first_column is not None:
                del ends[thread]  # no other call can continue this one
                return run, first_column
        return None, 0
