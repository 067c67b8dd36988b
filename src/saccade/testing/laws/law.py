"""The `Law` class: a statement about attention, and a function that looks for a counter-example."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from saccade.testing.case import Case
from saccade.testing.kernel_under_test import Subject

Trial = Callable[[Subject, Case, torch.dtype], None]
Condition = Callable[[Subject, Case], str | None]


@dataclasses.dataclass(frozen=True)
class Law:
    """A statement about attention that an attention function satisfies or breaks.

    ``law(subject, case, dtype)`` tries the law, and raises `LawBroken` with a counter-example if the law is broken.

    Attributes:
        name: the name in reports.
        statement: the law in one sentence.
        trial: the function that looks for a counter-example.
        needs: names of options that a function must offer in addition to the options of the case, including "lse" and
            "gqa"; None for a law that tries options that are not offered.
        where: conditions on the case; each returns the reason why the law does not apply, or None.
        cases: the law's own cases, if the law is not about masks; if None, the cases of `check`.
        dtypes: the law's own dtypes; if None, the dtypes of `check`.
        non_finite: whether the law is about NaN and inf in the inputs, so that no result on finite inputs breaks it.
    """

    name: str
    statement: str
    trial: Trial
    needs: tuple[str, ...] | None = ()
    where: tuple[Condition, ...] = ()
    cases: tuple[Case, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    non_finite: bool = False

    def __call__(self, subject: Subject, case: Case, dtype: torch.dtype) -> None:
        """Try the law on a case, and raise `LawBroken` if the law does not hold."""
        self.trial(subject, case, dtype)

    def __str__(self) -> str:
        return self.name

    def reasons(self, subject: Subject, case: Case) -> tuple[str, ...]:
        """Return the reasons why the law does not apply to a case; empty if the law applies."""
        reasons = (condition(subject, case) for condition in self.where)
        return tuple(reason for reason in reasons if reason is not None)


def law(
    *,
    needs: tuple[str, ...] | None = (),
    where: tuple[Condition, ...] = (),
    cases: tuple[Case, ...] | None = None,
    dtypes: tuple[torch.dtype, ...] | None = None,
    non_finite: bool = False,
) -> Callable[[Trial], Law]:
    """Turn a function into a `Law` with the function's name. The first paragraph of its docstring is the statement."""

    def make(trial: Trial) -> Law:
        statement = " ".join((trial.__doc__ or "").split("\n\n")[0].split())
        return Law(trial.__name__, statement, trial, needs, where, cases, dtypes, non_finite)

    return make
