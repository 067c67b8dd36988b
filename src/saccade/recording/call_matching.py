"""Match calls with earlier calls that they continue, as the steps of a generation do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from saccade.engine.block_sparse.selected_blocks import at_positions
from saccade.matrix import AttentionMatrix, Matrix
from saccade.mechanisms.recurrences.recurrence_matrix import RecurrenceMatrix
from saccade.support.errors import UnsupportedError

if TYPE_CHECKING:
    from saccade.recording.layer_record import Run


class Mark(NamedTuple):
    """The end of a call, by which the call that continues it is recognised.

    Attributes:
        newest: the key of its last token, ``[batch, kv_heads, head_dim]``; None if keys are unknown.
        last: the last key, which differs from ``newest`` if the cache has free places.
        tokens: number of keys of the whole text up to its last token.
        kv_len: number of keys of the call.
        position: the position of its last query; None if each item has different positions.
    """

    newest: Tensor | None
    last: Tensor | None
    tokens: int
    kv_len: int
    position: int | None

    @classmethod
    def of(cls, matrix: Matrix, first_column: int = 0) -> Mark:
        """Return the mark of a call whose first key has this number in the whole text."""
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
            return None  # all keys are equal, so they do not show whether there is a new one
        first = self.tokens + q_len - 1 - place
        return first if first >= 0 else None

    def repeated(self, matrix: Matrix) -> int | None:
        """Return the number of the first key of the next call if that call has the same keys; else None.

        This is the case in cross-attention, in which only the queries continue.
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
        """Return whether the last query of a call is at a later position, or has more keys."""
        position = _position_of_last(matrix)
        has_moved = self.position is not None and position is not None and position > self.position
        return has_moved or matrix.shape[3] > self.kv_len


def _key_of(matrix: Matrix) -> Tensor | None:
    """Return the keys, ``[batch, kv_heads, len, head_dim]``; None if they are unknown."""
    if isinstance(matrix, AttentionMatrix):
        return matrix.inputs.key.detach()
    key = matrix.key if isinstance(matrix, RecurrenceMatrix) else None
    return None if key is None or not key.shape[2] else key.detach()


def _position_of_last(matrix: Matrix) -> int | None:
    if not isinstance(matrix, AttentionMatrix) or at_positions(matrix.inputs.rule) is not None:
        return None
    return matrix.inputs.origin[0] + matrix.shape[2] - 1


def place_of_last(matrix: Matrix) -> int:
    """Return the index of the last query's key: the last one, unless the cache has free places."""
    if not isinstance(matrix, AttentionMatrix):
        key = _key_of(matrix)
        return matrix.shape[3] - 1 if key is None else key.shape[2] - 1
    kv_len, (q_first, kv_first) = matrix.shape[3], matrix.inputs.origin
    if at_positions(matrix.inputs.rule) is not None:
        return kv_len - 1
    place = q_first + matrix.shape[2] - 1 - kv_first
    return place if 0 <= place < kv_len else kv_len - 1


_REMEMBERED = 64  # threads of a layer; one more drops the oldest, whose next call begins a new run


class Ends:
    """The ends of the last calls of each layer, by thread.

    A call continues a run if it adds keys to those of the run's last call. Cross-attention adds none: a call with the
    same keys continues a run only in a step of a generation, that is, if the self-attention that ran before it in
    the same thread continued one. Otherwise two passes over one input would become one run.

    Not thread-safe by itself: the collector holds its lock.
    """

    def __init__(self) -> None:
        # For each layer, the end of each thread's last call, the newest last. Layers that are not chosen have no runs.
        self._ends: dict[str, dict[int, tuple[Run | None, Mark]]] = {}
        self._is_step: dict[int, bool] = {}
        self._not_chosen: dict[int, tuple[str, Callable[[], Matrix]]] = {}

    def pass_over(self, name: str, make: Callable[[], Matrix]) -> None:
        """Remember the call of a layer that is not chosen until the next call of this thread, which may need it."""
        self._not_chosen[threading.get_ident()] = (name, make)

    def forget_passed_over(self) -> None:
        """Forget the calls of layers that are not chosen."""
        self._not_chosen.clear()

    def continued(self, name: str, matrix: Matrix) -> tuple[Run | None, int]:
        """Return the run that a call continues, preferably of its own thread, and its first column there."""
        here = threading.get_ident()
        passed_over = self._not_chosen.pop(here, None)
        run, first_column = self._match(name, matrix, lambda mark: mark.extended(matrix))
        if run is None and passed_over is not None and matrix.shape[2] != matrix.shape[3]:
            self._follow(*passed_over)
        if run is None and self._is_step.get(here):
            run, first_column = self._match(name, matrix, lambda mark: mark.repeated(matrix))
        self._is_step[here] = run is not None
        return run, first_column

    def end(self, name: str, run: Run | None, matrix: Matrix, first_column: int) -> None:
        """Remember the end of a call."""
        ends = self._ends.setdefault(name, {})
        ends.pop(threading.get_ident(), None)
        ends[threading.get_ident()] = (run, Mark.of(matrix, first_column))
        for oldest in [*ends][:-_REMEMBERED]:
            del ends[oldest]

    def _follow(self, name: str, make: Callable[[], Matrix]) -> None:
        """Note whether a layer that is not chosen is in a step of a generation."""
        here = threading.get_ident()
        try:
            matrix = make()
        except UnsupportedError:  # a layer without a matrix shows no step
            return
        first_columns = (mark.extended(matrix) for _, mark in self._ends.get(name, {}).values())
        first_column = next((first for first in first_columns if first is not None), None)
        self._is_step[here] = first_column is not None
        self.end(name, None, matrix, first_column or 0)

    def _match(self, name: str, matrix: Matrix, first_of: Callable[[Mark], int | None]) -> tuple[Run | None, int]:
        ends = self._ends.get(name, {})
        newest_first = [*reversed(ends)]
        for thread in sorted(newest_first, key=lambda thread: thread != threading.get_ident()):
            run, mark = ends[thread]
            first_column = first_of(mark) if run is not None and run._fits(matrix) else None
            if first_column is not None:
                del ends[thread]  # no other call continues from there
                return run, first_column
        return None, 0
