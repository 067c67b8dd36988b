"""Laws about what a function says of itself: a "no" is tried like a "yes"."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from saccade.errors import UnsupportedError
from saccade.testing.case import Case
from saccade.testing.laws.backward import random_like, some_bias
from saccade.testing.laws.expect import LawBroken, holds
from saccade.testing.laws.law import law
from saccade.testing.problem import Problem
from saccade.testing.subject import OPTIONS, Subject

__all__ = ["LAWS"]


@dataclasses.dataclass(frozen=True)
class _Question:
    """A problem as it is put to a function: what it must offer to answer, and what else is special about it."""

    what: str
    problem: Problem
    needed: tuple[str, ...]
    gradients: bool = True
    lse: bool = False

    def ask(self, subject: Subject) -> None:
        """Forward and backward."""
        with torch.set_grad_enabled(self.gradients):
            if self.lse:
                out, _ = subject.ask(subject.lse_function, self.problem)
            else:
                out = subject.ask(subject.function, self.problem)
        if isinstance(out, Tensor) and out.requires_grad:
            leaves = (self.problem.query, self.problem.bias)
            wanted = [x for x in leaves if x is not None and x.requires_grad]
            torch.autograd.grad(out, wanted, random_like(out), allow_unused=True)

    def missing(self, subject: Subject) -> tuple[str, ...]:
        """What the function must offer to answer, and does not."""
        return subject.missing(self.needed)

    def reasons(self, subject: Subject) -> tuple[str, ...]:
        """What the function says against it beforehand."""
        with torch.set_grad_enabled(self.gradients):
            return subject.reasons_against(self.problem)

    def is_declined(self, subject: Subject) -> bool:
        """It is to be refused, by what was said beforehand."""
        return bool(self.missing(subject) or self.reasons(subject))


def declines(subject: Subject, case: Case) -> str | None:
    """Something is declined beforehand."""
    declined = any(question.is_declined(subject) for question in _questions(subject, case, torch.float32))
    return None if declined else "nothing is declined"


def promises(subject: Subject, case: Case) -> str | None:
    """It is said beforehand what is answered."""
    return None if subject.promises else "it is not said beforehand what is answered"


@law(needs=None, where=(declines,))
def declined(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """What is declined beforehand is refused with an error, for the reasons given; it is never silently ignored."""
    control = _control(subject, case, dtype)
    if not control.is_declined(subject):
        control.ask(subject)  # who refuses this too refuses everything: then the law cannot be tried
    for question in _questions(subject, case, dtype):
        if question.is_declined(subject):
            _is_refused(subject, question)


@law(where=(promises,))
def offered(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """What is offered is answered, forward and backward: nothing is refused that was not declined beforehand."""
    for question in _questions(subject, case, dtype):
        if question.is_declined(subject):
            continue
        try:
            question.ask(subject)
        except NotImplementedError as refusal:
            why = "; ".join(refusal.reasons) if isinstance(refusal, UnsupportedError) else str(refusal)
            raise LawBroken(f"{question.what}: not declined beforehand, but refused ({why})") from None


def _is_refused(subject: Subject, question: _Question) -> None:
    missing, reasons = question.missing(subject), question.reasons(subject)
    said = f"{question.what}: declined beforehand ({'; '.join((*missing, *reasons))})"
    try:
        question.ask(subject)
    except Exception as refusal:
        if not missing:  # who takes an option and gives reasons against it refuses it for these, not by accident
            holds(isinstance(refusal, NotImplementedError), f"{said}, but then {type(refusal).__name__} is raised")
            others = refusal.reasons if isinstance(refusal, UnsupportedError) else reasons
            holds(others == reasons, f"{said}, but refused for another reason ({'; '.join(others)})")
    else:
        raise LawBroken(f"{said}, but answered")


def _control(subject: Subject, case: Case, dtype: torch.dtype) -> _Question:
    """The case without anything that a function need not offer."""
    problem = case.problem(dtype, subject.device)
    problem = problem if "gqa" in subject.offers else problem.ungrouped()
    plain = problem.but(bias=None, scale=None, softcap=None, q_positions=None, kv_positions=None)
    return _Question("nothing special", plain, ())


def _questions(subject: Subject, case: Case, dtype: torch.dtype) -> Iterator[_Question]:
    """A case with no option, each and all, in each form, without gradients and with each kind that there is."""
    problem = case.problem(dtype, subject.device)
    needed = case.explicit_positions if subject.masks == "objects" else ()
    forms = [("", problem, (*needed, "gqa") if problem.repeats > 1 else needed)]
    if problem.repeats > 1 and "gqa" not in subject.offers:
        forms = [("grouped heads, ", *forms[0][1:]), ("", problem.ungrouped(), needed)]
    for form, plain, needs in forms:
        for names in ((), *((name,) for name in OPTIONS), OPTIONS):
            asked = plain.but(**{name: _SOME[name](plain) for name in names if getattr(plain, name) is None})
            question = _Question(form + (", ".join(names) or "no option"), asked, (*needs, *asked.options))
            if subject.unsaid.isdisjoint(question.needed):
                yield from _in_every_way(question, "lse" in subject.offers)


def _in_every_way(question: _Question, lse: bool) -> Iterator[_Question]:
    what, problem = question.what, question.problem
    ways = [question, dataclasses.replace(question, what=f"{what}, with gradients", problem=problem.leaves())]
    if problem.bias is not None:
        trainable = dataclasses.replace(
            question, what=f"{what}, with a gradient of the bias", problem=problem.leaves(bias=True)
        )
        switched_off = dataclasses.replace(trainable, what=f"{what}, with gradients switched off", gradients=False)
        ways += [trainable, switched_off]
    yield from ways
    if lse:
        yield from (dataclasses.replace(way, what=f"{way.what}, with the lse", lse=True) for way in ways)


_SOME: dict[str, Callable[[Problem], object]] = {
    "bias": some_bias,
    "scale": lambda problem: 0.5,
    "softcap": lambda problem: 2.0,
    "dropout_p": lambda problem: 0.5,
}

LAWS = (declined, offered)
