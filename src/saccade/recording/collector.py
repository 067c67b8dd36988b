"""Recorder: hears each call of a layer, and fills a recording."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from saccade.matrix import Matrix
from saccade.recording.derived_matrices import chosen_heads
from saccade.recording.ends import Ends
from saccade.recording.kept_matrices import KeptMatrices
from saccade.recording.layer_record import Call, Run, statistics_of
from saccade.recording.layer_selection import Selection
from saccade.statistics import Statistic

CALLED_AS = "record"  # in errors


class Kept(NamedTuple):
    """What is kept of each call.

    Attributes:
        statistics: questions.
        summaries: whether all statistics are kept.
        matrices: whether queries and keys are kept.
    """

    statistics: tuple[Statistic[Any, Any], ...]
    summaries: bool
    matrices: bool


class Recorder:
    """Takes in the calls that taps hear, in whichever thread the model runs, and fills ``runs``.

    Args:
        kept: what of each call.
        selection: of which layers and heads.
        callback: called with each matrix; none when None.
    """

    def __init__(self, kept: Kept, selection: Selection, callback: Callable[[str, Matrix], None] | None):
        self._kept, self._selection, self._callback = kept, selection, callback
        self.runs: dict[str, list[Run]] = {}
        self._ends = Ends()
        self._lock = threading.Lock()
        self._is_over = False

    def hear(self, name: str, make: Callable[[], Matrix]) -> None:
        """Take in one call of a layer."""
        with self._lock:
            if not self._selection.has_layer(name):
                self._ends.pass_over(name, make)
                return
        matrix = make() if self._selection.heads is None else chosen_heads(make(), self._selection.heads)
        if self._callback is not None:
            self._callback(name, matrix)
        if any(self._kept):
            self._take(name, matrix)

    def end(self) -> None:
        """Take in nothing any more, also of calls that other threads are in the middle of."""
        with self._lock:
            self._is_over = True
            self._ends.forget_passed_over()

    def _take(self, name: str, matrix: Matrix) -> None:
        # Answers first: what cannot be answered leaves no trace, and threads can be asked side by side.
        summary, statistics = statistics_of(matrix) if self._kept.summaries else (None, None)
        call = Call(matrix.shape, 0, matrix.compute(*self._kept.statistics), summary, statistics)
        with self._lock:
            if self._is_over:
                return
            run, first_column = self._ends.continued(name, matrix)
            is_new = run is None
            run = run or Run(name, self._kept.statistics, KeptMatrices() if self._kept.matrices else None)
            run._take(matrix, call._replace(first_column=first_column))
            if is_new:
                self.runs[name] = [*self.runs.get(name, []), run]
            self._ends.end(name, run, matrix, first_column)
