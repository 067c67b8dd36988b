"""Recorder: hears each call of a layer, and fills a recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from saccade.matrix import Matrix
from saccade.recording.choice import Choice
from saccade.recording.continuation import Mark
from saccade.recording.held import Held
from saccade.recording.run import Run
from saccade.recording.some_heads import SomeHeads
from saccade.statistics import Fold

__all__ = ["Kept", "Recorder"]


class Kept(NamedTuple):
    """What is kept of each call.

    Attributes:
        folds: questions.
        optional: those of them that are left out where rows are no distributions, since nobody named them.
        matrices: whether queries and keys are kept.
    """

    folds: tuple[Fold[Any, Any], ...]
    optional: tuple[Fold[Any, Any], ...]
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
        matrix, heads = make(), self._choice.heads
        if self._callback is not None:
            self._callback(name, matrix if heads is None else SomeHeads(matrix, heads))
        if self._kept.folds or self._kept.matrices:
            run, first_column = self._run_of(name, matrix)
            run.take(matrix, first_column)
            self._marks[name] = Mark.of(matrix, first_column)
            self.runs.setdefault(name, [])
            if not self.runs[name] or self.runs[name][-1] is not run:
                self.runs[name].append(run)

    def _run_of(self, name: str, matrix: Matrix) -> tuple[Run, int]:
        """The run that a call belongs to, and which key of it the call's first one is."""
        runs, mark = self.runs.get(name, []), self._marks.get(name)
        if mark is not None and runs[-1].fits(matrix):
            first_column = mark.continued(matrix)
            if first_column is not None:
                return runs[-1], first_column
        held = Held() if self._kept.matrices else None
        return Run(name, self._fitting(matrix), held, self._choice.heads), 0

    def _fitting(self, matrix: Matrix) -> tuple[Fold[Any, Any], ...]:
        if matrix.is_stochastic:
            return self._kept.folds
        return tuple(x for x in self._kept.folds if not (x.needs_distributions and x in self._kept.optional))
