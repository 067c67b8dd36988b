"""Outcomes of runs as a table: a row for each mixer, a column for each task."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from saccade.learning.runs import Run
from saccade.learning.task_presets import QUESTIONS
from saccade.learning.training import SOLVED, Outcome
from saccade.tasks import IGNORED

_NOT_ASKED = "-"
_SAMPLE = 2000  # sequences for counting the commonest answer


def rows(outcomes: Mapping[Run, Outcome]) -> list[list[str]]:
    """Return the lines of a table, names of columns first; the last line is the share of the commonest answer.

    A cell has the number of steps in which all seeds learned a task, or the mean share of right answers and its range.
    """
    mixers, questions = names(outcomes)
    lines = [["", *questions]]
    lines += [[mixer, *(_cell(_select(outcomes, mixer, question)) for question in questions)] for mixer in mixers]
    return [*lines, ["the commonest answer", *(f"{_commonest_share(question):.2f}" for question in questions)]]


def names(outcomes: Mapping[Run, Outcome]) -> tuple[list[str], list[str]]:
    """Return mixers and questions in order of appearance."""
    both = [run.mixer for run in outcomes], [run.question for run in outcomes]
    return list(dict.fromkeys(both[0])), list(dict.fromkeys(both[1]))


def shares(outcomes: Mapping[Run, Outcome]) -> list[list[float]]:
    """Return mean shares of right answers, a row for each mixer; NaN for runs that do not exist."""
    mixers, questions = names(outcomes)
    cells = [[[x.accuracy for x in _select(outcomes, mixer, question)] for question in questions] for mixer in mixers]
    return [[statistics.mean(cell) if cell else math.nan for cell in line] for line in cells]


def legend(outcomes: Mapping[Run, Outcome]) -> str:
    """Return an explanation of the cells, and the cost of the runs."""
    seeds, minutes = len({run.seed for run in outcomes}), sum(outcome.seconds for outcome in outcomes.values()) / 60
    return (
        f"Share of right answers to fresh texts, mean over {seeds} seed{'' if seeds == 1 else 's'} (least to most), or "
        f"in how many steps all learned ({SOLVED:.0%} right). {len(outcomes)} runs, {minutes:.0f} minutes of one core."
    )


def _select(outcomes: Mapping[Run, Outcome], mixer: str, question: str) -> list[Outcome]:
    return [outcomes[run] for run in outcomes if run[:2] == (mixer, question)]


def _cell(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return _NOT_ASKED
    shares = [outcome.accuracy for outcome in outcomes]
    if min(shares) >= SOLVED:
        return f"learned, {round(statistics.mean(outcome.steps for outcome in outcomes))}"
    mean = f"{statistics.mean(shares):.2f}"
    return f"{mean} ({min(shares):.2f} to {max(shares):.2f})" if len(shares) > 1 else mean


def _commonest_share(question: str) -> float:
    targets = QUESTIONS[question].make(_SAMPLE, 0).targets
    asked = targets[targets != IGNORED]
    return float(asked.bincount().max() / len(asked))
