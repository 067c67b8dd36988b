"""Laws about declared options: both refusals and offers are tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from saccade.support.errors import UnsupportedError
from saccade.testing.case import Case
from saccade.testing.laws.backward import random_like
from saccade.testing.laws.example_options import SOME
from saccade.testing.laws.expect import LawBroken, holds
from saccade.testing.laws.law import law
from saccade.testing.problem import Problem
from saccade.testing.subject import OPTIONS, Subject


@dataclasses.dataclass(frozen=True)
class _Question:
    """A problem with a special property, and the options that it needs."""

    what: str
    problem: Problem
    needed: tuple[str, ...]
    gradients: bool = True

    def ask(self, subject: Subject, function: Callable[..., Any] | None) -> None:
        """Run forward and backward; the function with lse also returns the output."""
        with torch.set_grad_enabled(self.gradients):
            out = subject.ask(function, self.problem)
        out = out[0] if isinstance(out, tuple) else out
        if isinstance(out, Tensor) and out.requires_grad:
            leaves = (self.problem.query, self.problem.bias, *self.problem.parameters().values())
            wanted = [x for x in leaves if x is not None and x.requires_grad]
            torch.autograd.grad(out, wanted, random_like(out), allow_unused=True)

    def missing(self, subject: Subject) -> tuple[str, ...]:
        """Return the needed options that the function does not offer."""
        return subject.missing(self.needed)

    def reasons(self, subject: Subject) -> tuple[str, ...]:
        """Return the reasons of the function against it."""
        with torch.set_grad_enabled(self.gradients):
            return subject.reasons_against(self.problem)


def declines(subject: Subject, case: Case) -> str | None:
    """Require that the function declines something."""
    asked = _questions(subject, case, torch.float32)
    declined = any(question.missing(subject) or question.reasons(subject) for question in asked)
    return None if declined else "nothing is declined"


def promises(subject: Subject, case: Case) -> str | None:
    """Require that the accepted options are declared."""
    return None if subject.promises else "it is not said beforehand what is answered"


@law(needs=None, where=(declines,))
def declined(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """An input that is declined beforehand is refused with an error, for the stated reasons; it is never ignored."""
    control = _control(subject, case, dtype)
    if not control.missing(subject) and not control.reasons(subject):
        control.ask(subject, subject.function)  # a function that refuses this too refuses everything
    for question in _questions(subject, case, dtype):
        missing, reasons = question.missing(subject), question.reasons(subject)
        if missing or reasons:
            for form, function in _functions(subject):
                said = f"{question.what}{form}: declined beforehand ({'; '.join((*missing, *reasons))})"
                _is_refused(subject, question, function, said, None if missing else reasons)


@law(where=(promises,))
def offered(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """An offered option is answered, forward and backward: no input is refused that was not declined beforehand."""
    for question in _questions(subject, case, dtype):
        if question.missing(subject) or question.reasons(subject):
            continue
        for form, function in _functions(subject):
            try:
                question.ask(subject, function)
            except NotImplementedError as refusal:
                why = "; ".join(refusal.reasons) if isinstance(refusal, UnsupportedError) else str(refusal)
                sentence = f"{question.what}{form}: not declined beforehand, but refused ({why})"
                raise LawBroken(sentence) from None


def _functions(subject: Subject) -> tuple[tuple[str, Callable[..., Any] | None], ...]:
    functions = (("", subject.function), (", with the lse", subject.lse_function))
    return functions if "lse" in subject.offers else functions[:1]


def _is_refused(
    subject: Subject,
    question: _Question,
    function: Callable[..., Any] | None,
    said: str,
    reasons: tuple[str, ...] | None,
) -> None:
    try:
        question.ask(subject, function)
    except Exception as refusal:
        if reasons is not None:  # an accepted option with reasons against it is not refused by accident
            holds(isinstance(refusal, NotImplementedError), f"{said}, but then {type(refusal).__name__} is raised")
            others = refusal.reasons if isinstance(refusal, UnsupportedError) else reasons
            holds(others == reasons, f"{said}, but refused for another reason ({'; '.join(others)})")
    else:
        raise LawBroken(f"{said}, but answered")


def _control(subject: Subject, case: Case, dtype: torch.dtype) -> _Question:
    """Return the case without optional features."""
    problem = case.problem(dtype, subject.device)
    problem = problem if "gqa" in subject.offers else problem.ungrouped()
    plain = problem.but(**dict.fromkeys((*OPTIONS, "q_positions", "kv_positions")))
    if plain.key.shape[3] != plain.query.shape[3]:  # only some scores take two widths
        plain = plain.but(key=plain.query[:, : plain.key.shape[1], :1].expand(-1, -1, plain.key.shape[2], -1))
    return _Question("nothing special", plain, ())


def _questions(subject: Subject, case: Case, dtype: torch.dtype) -> Iterator[_Question]:
    """Yield the case with no option, each option and all, in every form, without and with gradients."""
    problem = case.problem(dtype, subject.device)
    forms: list[tuple[str, Problem, tuple[str, ...]]] = [("", problem, ("gqa",) if problem.repeats > 1 else ())]
    if problem.repeats > 1 and "gqa" not in subject.offers:
        forms = [("grouped heads, ", *forms[0][1:]), ("", problem.ungrouped(), ())]
    together = tuple(name for name in OPTIONS if name != "relative")  # a tensor bias replaces it
    for form, plain, needs in forms:
        for names in ((), *((name,) for name in OPTIONS), together):
            if names == ("relative",) and plain.bias is not None:
                continue  # an existing bias would hide it
            asked = plain.but(**{name: SOME[name](plain) for name in names if getattr(plain, name) is None})
            needed = (*needs, *subject.needed(asked))
            question = _Question(form + (", ".join(names) or "no option"), asked, needed)
            if subject.unsaid.isdisjoint(question.needed):
                yield from _in_every_way(question)


def _in_every_way(question: _Question) -> Iterator[_Question]:
    what, problem = question.what, question.problem
    ways = [question, dataclasses.replace(question, what=f"{what}, with gradients", problem=problem.leaves())]
    if problem.bias is not None:
        trainable = dataclasses.replace(
            question, what=f"{what}, with a gradient of the bias", problem=problem.leaves(bias=True)
        )
        switched_off = dataclasses.replace(trainable, what=f"{what}, with gradients switched off", gradients=False)
        ways += [trainable, switched_off]
    if problem.parameters():
        trained = problem.leaves(parameters=True)
        ways.append(dataclasses.replace(question, what=f"{what}, with gradients of parameters", problem=trained))
    yield from ways


LAWS = (declined, offered)
