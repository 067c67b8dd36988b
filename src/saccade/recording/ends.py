"""Ends: where the last calls of each layer ended, and which run the next call continues."""

from __future__ import annotations

import threading
from collections.abc import Callable

from saccade.matrix import Matrix
from saccade.recording.call_matching import Mark
from saccade.recording.layer_record import Run
from saccade.support.errors import UnsupportedError

_REMEMBERED = 64  # threads of a layer; the next one forgets the oldest, whose next call begins a new run


class Ends:
    """The ends of the last calls of each layer, by thread.

    A call continues a run if it adds keys to those of the run's last call. Cross-attention adds none: a call with the
    same keys continues a run only in a step of a generation, that is, where the self-attention that ran before it in
    the same thread continued one. Otherwise two passes over one input would become one run.

    Not safe for threads by itself: the recorder holds its lock.
    """

    def __init__(self) -> None:
        # Of each layer, where the last call of each thread ended, the newest last. Layers not chosen have no runs.
        self._ends: dict[str, dict[int, tuple[Run | None, Mark]]] = {}
        self._is_step: dict[int, bool] = {}
        self._not_chosen: dict[int, tuple[str, Callable[[], Matrix]]] = {}

    def pass_over(self, name: str, make: Callable[[], Matrix]) -> None:
        """Remember the call of a layer that is not chosen until the next call of this thread, which may ask for it."""
        self._not_chosen[threading.get_ident()] = (name, make)

    def forget_passed_over(self) -> None:
        """Let go of the calls of layers that are not chosen."""
        self._not_chosen.clear()

    def continued(self, name: str, matrix: Matrix) -> tuple[Run | None, int]:
        """Return the run that a call continues and its first column there: that of its own thread before any other."""
        here = threading.get_ident()
        passed_over = self._not_chosen.pop(here, None)
        run, first_column = self._found(name, matrix, lambda mark: mark.extended(matrix))
        if run is None and passed_over is not None and matrix.shape[2] != matrix.shape[3]:
            self._follow(*passed_over)
        if run is None and self._is_step.get(here):
            run, first_column = self._found(name, matrix, lambda mark: mark.repeated(matrix))
        self._is_step[here] = run is not None
        return run, first_column

    def end(self, name: str, run: Run | None, matrix: Matrix, first_column: int) -> None:
        """Remember where a call ended."""
        ends = self._ends.setdefault(name, {})
        ends.pop(threading.get_ident(), None)
        ends[threading.get_ident()] = (run, Mark.of(matrix, first_column))
        for oldest in [*ends][:-_REMEMBERED]:
            del ends[oldest]

    def _follow(self, name: str, make: Callable[[], Matrix]) -> None:
        """Find out whether a layer that is not chosen is in a step of a generation."""
        here = threading.get_ident()
        try:
            matrix = make()
        except UnsupportedError:  # a layer that is not chosen need not have a matrix, and then shows no step
            return
        first_columns = (mark.extended(matrix) for _, mark in self._ends.get(name, {}).values())
        first_column = next((first for first in first_columns if first is not None), None)
        self._is_step[here] = first_column is not None
        self.end(name, None, matrix, first_column or 0)

    def _found(self, name: str, matrix: Matrix, first_of: Callable[[Mark], int | None]) -> tuple[Run | None, int]:
        ends = self._ends.get(name, {})
        newest_first = [*reversed(ends)]
        for thread in sorted(newest_first, key=lambda thread: thread != threading.get_ident()):
            run, mark = ends[thread]
            first_column = first_of(mark) if run is not None and run._fits(matrix) else None
            if first_column is not None:
                del ends[thread]  # nothing else goes on from there
                return run, first_column
        return None, 0
