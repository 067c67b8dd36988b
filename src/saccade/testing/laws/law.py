"""A law: a sentence, and a function that tries to break it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from saccade.testing.case import Case
from saccade.testing.subject import Subject

Trial = Callable[[Subject, Case, torch.dtype], None]
Condition = Callable[[Subject, Case], str | None]


@dataclasses.dataclass(frozen=True)
class Law:
    """A statement about attention that a function keeps or breaks.

    ``law(subject, case, dtype)`` tries it, and raises `LawBroken` with a counter-example if it is broken.

    Attributes:
        name: one word or two.
        statement: the law in one sentence.
        trial: the function behind it.
        needs: options that a function must offer, besides those of the case: names, "lse" or "gqa"; None for a law
            that tries options that are not offered.
        where: conditions on the case; each returns the reason why the law does not apply, or None.
        cases: cases of a law that is not about masks; None means those of the suite.
        dtypes: dtypes of the law; None means those of the suite.
    """

    name: str
    statement: str
    trial: Trial
    needs: tuple[str, ...] | None = ()
    where: tuple[Condition, ...] = ()
    cases: tuple[Case, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None

    def __call__(self, subject: Subject, case: Case, dtype: torch.dtype) -> None:
        """Return if the law holds, raise `LawBroken` if not."""
        self.trial(subject, case, dtype)

    def __str__(self) -> str:
        return self.name

    def reasons(self, subject: Subject, case: Case) -> tuple[str, ...]:
        """Return why the law does not apply to a case; empty if it does."""
        found = (condition(subject, case) for condition in self.where)
        return tuple(reason for reason in found if reason is not None)


def law(
    *,
    needs: tuple[str, ...] | None = (),
    where: tuple[Condition, ...] = (),
    cases: tuple[Case, ...] | None = None,
    dtypes: tuple[torch.dtype, ...] | None = None,
) -> Callable[[Trial], Law]:
    """Make a law of a function: its name is the name, the first paragraph of its docstring the statement."""

    def make(trial: Trial) -> Law:
        statement = " ".join((trial.__doc__ or "").split("\n\n")[0].split())
        return Law(trial.__name__, statement, trial, needs, where, cases, dtypes)

    return make
