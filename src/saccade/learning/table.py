"""What came of runs, as a table: a row for each mixer, a column for each question."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from saccade.learning.runs import Run
from saccade.learning.task_presets import QUESTIONS
from saccade.learning.training import SOLVED, Outcome
from saccade.tasks import IGNORED

__all__ = ["legend", "names", "rows", "shares"]

_NOT_ASKED = "-"
_SAMPLE = 2000  # texts in which the commonest answer is counted


def rows(outcomes: Mapping[Run, Outcome]) -> list[list[str]]:
    """Lines of a table, names of columns first; the last line is what the commonest answer alone would get.

    A cell says in how many steps all seeds learned a task, or the mean share of right answers and its range.
    """
    mixers, questions = names(outcomes)
    lines = [["", *questions]]
    lines += [[mixer, *(_cell(_of(outcomes, mixer, question)) for question in questions)] for mixer in mixers]
    return [*lines, ["the commonest answer", *(f"{_guessed(question):.2f}" for question in questions)]]


def names(outcomes: Mapping[Run, Outcome]) -> tuple[list[str], list[str]]:
    """Mixers, and questions, in the order in which they came."""
    both = [run.mixer for run in outcomes], [run.question for run in outcomes]
    return list(dict.fromkeys(both[0])), list(dict.fromkeys(both[1]))


def shares(outcomes: Mapping[Run, Outcome]) -> list[list[float]]:
    """Mean shares of right answers, a row for each mixer; NaN where a question was not asked."""
    mixers, questions = names(outcomes)
    found = [[[x.accuracy for x in _of(outcomes, one, other)] for other in questions] for one in mixers]
    return [[statistics.mean(own) if own else math.nan for own in line] for line in found]


def legend(outcomes: Mapping[Run, Outcome]) -> str:
    """What cells are, and what the runs cost."""
    seeds, minutes = len({run.seed for run in outcomes}), sum(outcome.seconds for outcome in outcomes.values()) / 60
    return (
        f"Share of right answers to fresh texts, mean over {seeds} seed{'' if seeds == 1 else 's'} (least to most), or "
        f"in how many steps all learned ({SOLVED:.0%} right). {len(outcomes)} runs, {minutes:.0f} minutes of one core."
    )


def _of(outcomes: Mapping[Run, Outcome], mixer: str, question: str) -> list[Outcome]:
    return [outcomes[run] for run in outcomes if run[:2] == (mixer, question)]


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
