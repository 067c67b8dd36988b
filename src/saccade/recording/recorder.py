"""Recorder: hears each call of a layer, and fills a recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from saccade.matrix import Matrix
from saccade.recording.choice import Choice
from saccade.recording.continuation import Mark
from saccade.recording.held import Held
from saccade.recording.run import Run
from saccade.recording.some_heads import some_heads
from saccade.statistics import Fold

__all__ = ["Kept", "Recorder"]


class Kept(NamedTuple):
    """What is kept of each call.

    Attributes:
        folds: questions.
        summaries: whether all statistics are kept.
        matrices: whether queries and keys are kept.
    """

    folds: tuple[Fold[Any, Any], ...]
    summaries: bool
    matrices: bool


class Recorder:
    """What a tap calls, and what fills ``runs``.

    Args:
        kept: what of each call.
        choice: of which layers and heads.
        callback: called with each matrix; none when None.
    """

    def __init__(self, kept: Kept, choice: Choice, callback: Callable[[str, Matrix], None] | None):
        self._kept, self._choice, self._callback = kept, choice, callback
        self.runs: dict[str, list[Run]] = {}
        self._marks: dict[str, Mark] = {}

    def hear(self, name: str, make: Callable[[], Matrix]) -> None:
        """Take in one call of a layer."""
        if not self._choice.has_layer(name):
            return
        matrix = make() if self._choice.heads is None else some_heads(make(), self._choice.heads)
        if self._callback is not None:
            self._callback(name, matrix)
        if any(self._kept):
            self._take(name, matrix)

    def _take(self, name: str, matrix: Matrix) -> None:
        runs, mark = self.runs.get(name, []), self._marks.get(name)
        first_column = None
        if mark is not None and runs[-1]._fits(matrix):
            first_column = mark.continued(matrix)
        goes_on = first_column is not None
        held = Held() if self._kept.matrices else None
        run = runs[-1] if goes_on else Run(name, self._kept.folds, held)
        # Answers first: what cannot be answered leaves no trace.
        run._take(matrix, first_column or 0, with_summary=self._kept.summaries)
        self._marks[name] = Mark.of(matrix, first_column or 0)
        if not goes_on:
            self.runs[name] = [*runs, run]
