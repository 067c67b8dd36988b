"""What came of runs, as a table: a row for each mixer, a column for each question."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from saccade.learning.questions import QUESTIONS
from saccade.learning.runs import Run
from saccade.learning.training import SOLVED, Outcome
from saccade.tasks import IGNORED

__all__ = ["legend", "rows"]

_NOT_ASKED = "-"
_SAMPLE = 2000  # texts in which the commonest answer is counted


def rows(outcomes: Mapping[Run, Outcome]) -> list[list[str]]:
    """Lines of a table, names of columns first; the last line is what the commonest answer alone would get.

    A cell says in how many steps all seeds learned a task, or the mean share of right answers and its range.
    """
    mixers, questions = (
        list(dict.fromkeys(names)) for names in ([x.mixer for x in outcomes], [x.question for x in outcomes])
    )
    lines = [["", *questions]]
    for mixer in mixers:
        cells = [[outcomes[run] for run in outcomes if run[:2] == (mixer, question)] for question in questions]
        lines.append([mixer, *map(_cell, cells)])
    return [*lines, ["the commonest answer", *(f"{_guessed(question):.2f}" for question in questions)]]


def legend(outcomes: Mapping[Run, Outcome]) -> str:
    """What cells are, and what the runs cost."""
    seeds, minutes = len({run.seed for run in outcomes}), sum(outcome.seconds for outcome in outcomes.values()) / 60
    return (
        f"Share of right answers to fresh texts, mean over {seeds} seed{'' if seeds == 1 else 's'} (least to most), or "
        f"in how many steps all learned ({SOLVED:.0%} right). {len(outcomes)} runs, {minutes:.0f} minutes of one core."
    )


def _cell(own: Sequence[Outcome]) -> str:
    if not own:
        return _NOT_ASKED
    found = [outcome.accuracy for outcome in own]
    if min(found) >= SOLVED:
        return f"learned, {round(statistics.mean(outcome.steps for outcome in own))}"
    return f"{statistics.mean(found):.2f} ({min(found):.2f} to {max(found):.2f})" if len(own) > 1 else f"{found[0]:.2f}"


def _guessed(question: str) -> float:
    targets = QUESTIONS[question].make(_SAMPLE, 0).targets
    asked = targets[targets != IGNORED]
    return float(asked.bincount().max() / len(asked))
