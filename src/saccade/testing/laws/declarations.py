"""Laws about declared options: an attention function must accept and refuse exactly what it declares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from saccade.support.errors import UnsupportedError
from saccade.support.language import Message, joined
from saccade.testing.case import Case
from saccade.testing.kernel_under_test import OPTIONS, Subject
from saccade.testing.laws.backward import random_like
from saccade.testing.laws.example_options import EXAMPLES
from saccade.testing.laws.expect import LawBroken, holds
from saccade.testing.laws.law import law
from saccade.testing.problem import Problem
from saccade.testing.tolerances import Quantity, error, tolerance


@dataclasses.dataclass(frozen=True)
class _Trial:
    """An attention problem with certain options, to test whether the subject accepts or refuses them as declared."""

    what: str
    problem: Problem
    needed: tuple[str, ...]
    gradients: bool = True

    def run(self, subject: Subject, function: Callable[..., Any] | None) -> tuple[Any, ...]:
        """Run the forward and backward passes of ``function``; return the output, and the lse if it returns one."""
        with torch.set_grad_enabled(self.gradients):
            results = subject.apply(function, self.problem)
        results = results if isinstance(results, tuple) else (results,)
        if isinstance(results[0], Tensor) and results[0].requires_grad:
            self._gradients(results[0])
        return results

    def is_right(self, results: tuple[Any, ...], dtype: torch.dtype) -> bool:
        """Return whether the results of `run` and their gradients agree with the definition.

        Dropout is random, so a result with dropout never counts as right.
        """
        if "dropout_p" in self.problem.in_use or not all(isinstance(x, Tensor) for x in results):
            return False
        truth = self.problem.truth()
        quantities: tuple[Quantity, ...] = ("output", "lse")
        pairs = list(zip(results, truth, quantities, strict=False))
        if self.gradients and self._leaves():
            if not results[0].requires_grad:
                return False
            true = self._gradients(truth[0])
            pairs += [(*pair, "gradient") for pair in zip(self._gradients(results[0]), true, strict=True)]
        return all(got.shape == want.shape and error(got, want) <= tolerance(dtype, name) for got, want, name in pairs)

    def _leaves(self) -> list[Tensor]:
        problem = self.problem
        tensors = (problem.query, problem.key, problem.value, problem.bias, *problem.parameters().values())
        return [x for x in tensors if x is not None and x.requires_grad]

    def _gradients(self, out: Tensor) -> tuple[Tensor, ...]:
        upstream = random_like(out, self.problem.seed).to(self.problem.query.dtype).to(out.dtype)
        leaves = self._leaves()
        return torch.autograd.grad(out, leaves, upstream, retain_graph=True, allow_unused=True, materialize_grads=True)

    def missing(self, subject: Subject) -> tuple[str, ...]:
        """Return a reason for each option of the trial that the subject does not offer."""
        return subject.missing(self.needed)

    def reasons(self, subject: Subject) -> tuple[str, ...]:
        """Return the reasons, declared in advance, why the subject cannot run the trial."""
        with torch.set_grad_enabled(self.gradients):
            return subject.reasons_against(self.problem)


def declines_something(subject: Subject, case: Case) -> str | None:
    """Return a reason to skip laws about declined options if the subject supports every option, otherwise None."""
    trials = _trials(subject, case, torch.float32)
    return (
        None
        if any(trial.missing(subject) or trial.reasons(subject) for trial in trials)
        else "every option is supported"
    )


def declares_options(subject: Subject, case: Case) -> str | None:
    """Return a reason to skip laws about declared options if the subject declares none, otherwise None."""
    return None if subject.declares_options else "the accepted options are not declared"


@law(needs=None, where=(declines_something,))
def declined(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """An input that is declined in advance raises an error, or the result is right; an option is never ignored.

    If the function gives reasons in advance, the error must have the same reasons.
    """
    control = _control_trial(subject, case, dtype)
    if not control.missing(subject) and not control.reasons(subject):
        control.run(subject, subject.function)  # a function that refuses even this refuses everything
    for trial in _trials(subject, case, dtype):
        missing, reasons = trial.missing(subject), trial.reasons(subject)
        if missing or reasons:
            for form, function in _functions(subject):
                what = Message(
                    "{what}{form}: declared as unsupported ({reasons})",
                    what=trial.what,
                    form=Message(form),
                    reasons=joined((*missing, *reasons)),
                )
                _expect_refusal(subject, trial, function, what, None if missing else reasons, dtype)


@law(where=(declares_options,))
def offered(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """An offered option works forward and backward: the function refuses only inputs that it declines in advance."""
    for trial in _trials(subject, case, dtype):
        if trial.missing(subject) or trial.reasons(subject):
            continue
        for form, function in _functions(subject):
            try:
                trial.run(subject, function)
            except NotImplementedError as refusal:
                why = joined(refusal.reasons) if isinstance(refusal, UnsupportedError) else str(refusal)
                sentence = Message(
                    "{what}{form}: not declared as unsupported, but refused ({why})",
                    what=trial.what,
                    form=Message(form),
                    why=Message(why),
                )
                raise LawBroken(sentence) from None


def _functions(subject: Subject) -> tuple[tuple[str, Callable[..., Any] | None], ...]:
    functions = (("", subject.function), (", with the lse", subject.lse_function))
    return functions if "lse" in subject.offers else functions[:1]


def _expect_refusal(
    subject: Subject,
    trial: _Trial,
    function: Callable[..., Any] | None,
    what: str,
    reasons: tuple[str, ...] | None,
    dtype: torch.dtype,
) -> None:
    """Raise `LawBroken` unless a trial raises an error with these ``reasons``, or any error if they are None.

    If ``reasons`` is None, a correct result is allowed too; one key head, for example, broadcasts to all query heads.
    """
    try:
        results = trial.run(subject, function)
    except Exception as refusal:
        if reasons is not None:  # the refusal of an accepted option must match the declared reasons
            holds(
                isinstance(refusal, NotImplementedError),
                Message("{what}, but then {error} is raised", what=what, error=type(refusal).__name__),
            )
            others = refusal.reasons if isinstance(refusal, UnsupportedError) else reasons
            holds(
                others == reasons,
                Message("{what}, but refused for a different reason ({others})", what=what, others=joined(others)),
            )
    else:
        if reasons is not None:
            raise LawBroken(Message("{what}, but it returned a result", what=what))
        if not trial.is_right(results, dtype):
            raise LawBroken(Message("{what}, but it returned a wrong result", what=what))


def _control_trial(subject: Subject, case: Case, dtype: torch.dtype) -> _Trial:
    """Build the control trial: a case without special options, which every subject must accept."""
    problem = case.problem(dtype, subject.device)
    problem = problem if "gqa" in subject.offers else problem.ungrouped()
    plain = problem.but(**dict.fromkeys((*OPTIONS, "q_positions", "kv_positions")))
    if plain.key.shape[3] != plain.query.shape[3]:  # only some scores accept different widths of query and key
        plain = plain.but(key=plain.query[:, : plain.key.shape[1], :1].expand(-1, -1, plain.key.shape[2], -1))
    return _Trial("no special option", plain, ())


def _trials(subject: Subject, case: Case, dtype: torch.dtype) -> Iterator[_Trial]:
    """Yield trials of a case with no option, with each single option and with all, both with and without gradients."""
    problem = case.problem(dtype, subject.device)
    forms: list[tuple[str, Problem, tuple[str, ...]]] = [("", problem, ("gqa",) if problem.repeats > 1 else ())]
    if problem.repeats > 1 and "gqa" not in subject.offers:
        forms = [("grouped heads, ", *forms[0][1:]), ("", problem.ungrouped(), ())]
    together = tuple(name for name in OPTIONS if name != "relative")  # a tensor bias would replace the relative bias
    for form, plain, needs in forms:
        for names in ((), *((name,) for name in OPTIONS), together):
            if names == ("relative",) and plain.bias is not None:
                continue  # an existing bias would replace the relative bias
            with_options = plain.but(**{name: EXAMPLES[name](plain) for name in names if getattr(plain, name) is None})
            needed = (*needs, *subject.needed(with_options))
            trial = _Trial(_named(form, names), with_options, needed)
            if subject.undeclared.isdisjoint(trial.needed):
                yield from _with_gradients(trial)


def _named(form: str, names: tuple[str, ...]) -> Message:
    return Message("{form}{options}", form=Message(form), options=Message(", ".join(names) or "no option"))


def _with_gradients(trial: _Trial) -> Iterator[_Trial]:
    what, problem = trial.what, trial.problem
    ways = [
        trial,
        dataclasses.replace(trial, what=Message("{what}, with gradients", what=what), problem=problem.leaves()),
    ]
    if problem.bias is not None:
        trainable = dataclasses.replace(
            trial,
            what=Message("{what}, with a gradient of the bias", what=what),
            problem=problem.leaves(bias=True),
        )
        switched_off = dataclasses.replace(
            trainable, what=Message("{what}, with gradients switched off", what=what), gradients=False
        )
        ways += [trainable, switched_off]
    if problem.parameters():
        trained = problem.leaves(parameters=True)
        ways.append(
            dataclasses.replace(trial, what=Message("{what}, with gradients of parameters", what=what), problem=trained)
        )
    yield from ways


LAWS = (declined, offered)
