"""Laws about repeated calls: a result depends only on the values of its inputs, not on earlier calls or the caller."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from saccade.support.language import Message
from saccade.testing.case import Case
from saccade.testing.kernel_under_test import Subject
from saccade.testing.laws.backward import gradients, random_like, truth_gradients
from saccade.testing.laws.expect import holds, identical, near
from saccade.testing.laws.law import law
from saccade.testing.problem import Problem
from saccade.testing.size_cases import SHORT_CASES

_NAMES = ("query", "key", "value")
_FEW = SHORT_CASES[:6]
_FLOAT32 = (torch.float32,)


@law()
def determinism(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """Two identical calls give bitwise equal results."""
    problem = case.problem(dtype, subject.device)
    first, second = subject.output(problem), subject.output(problem)
    identical("the second output", second.nan_to_num(nan=0.0), first.nan_to_num(nan=0.0))


@law(cases=_FEW, dtypes=_FLOAT32)
def memory_of_calls(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """A result depends only on the values of the call's inputs, not on earlier calls, their memory or their results.

    The inputs change in place between calls, and the memory of earlier results is overwritten.
    """
    first = case.problem(dtype, subject.device)
    problem = _copied(first)
    for turn in range(3):
        for index, name in enumerate(_NAMES):
            x = getattr(problem, name)
            x.copy_(getattr(first, name) if turn != 1 else random_like(x, case.seed).roll(index))
        if subject.masks == "dense" and first.sees_something.all():
            problem.allowed.copy_(
                first.allowed if turn != 1 else first.allowed | (first.allowed.sum(-1) < 2)[..., None]
            )
        out = subject.output(problem)
        for name in _NAMES:
            shares = out.untyped_storage().data_ptr() == getattr(problem, name).untyped_storage().data_ptr()
            holds(not shares, Message("the output shares memory with the {name}", name=name))
        near(Message("the output of call {call} on the same memory", call=turn + 1), out, problem.truth()[0], dtype)
        kept = out.clone()
        subject.output(first.but(value=first.value * 2))
        holds(torch.equal(out, kept), "a later call changes the result of an earlier one")
        if not out.requires_grad:
            out.fill_(torch.nan)


@law(cases=_FEW, dtypes=_FLOAT32)
def repeats(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """Twelve calls on the same tensors, as in a benchmark, give equal results; a change of an input then takes effect.

    Results are compared bit by bit. The input is changed through ``.data``, which torch's version counter ignores.
    """
    problem = _copied(case.problem(dtype, subject.device))
    want, first = problem.truth()[0], subject.output(problem).clone()
    near("the output", first, want, dtype)
    for call in range(2, 13):
        identical(Message("the output of call {call}", call=call), subject.output(problem), first)
    for name in _NAMES:
        x = getattr(problem, name)
        x.data.copy_(random_like(x, case.seed))
        what = Message("the output after 12 equal calls, then a changed {name}", name=name)
        near(what, subject.output(problem), problem.truth()[0], dtype)


@law(cases=_FEW, dtypes=_FLOAT32)
def twins(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """The output stays right after two inner rows or entries of an input are swapped in place, at the same address."""
    first = case.problem(dtype, subject.device)
    problem = _copied(first)
    for name, twin in _twins(first):
        near("the output", subject.output(problem), first.truth()[0], dtype)
        getattr(problem, name).data.copy_(getattr(twin, name))
        near(Message("the output for a twin of the {name}", name=name), subject.output(problem), twin.truth()[0], dtype)
        near(
            Message("the output for a twin of the {name} in other memory", name=name),
            subject.output(twin),
            twin.truth()[0],
            dtype,
        )
        getattr(problem, name).data.copy_(getattr(first, name))


@law(cases=_FEW, dtypes=_FLOAT32)
def order_of_calls(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """The order of calls with different shapes does not matter, and a call on NaN does not affect later calls."""
    whole = case.problem(dtype, subject.device)
    shorter = dataclasses.replace(case, q_len=case.q_len - 1, kv_len=case.kv_len - 1, mask=None)
    other = shorter.problem(dtype, subject.device)
    nan = whole.but(**{name: torch.full_like(getattr(whole, name), torch.nan) for name in _NAMES})
    problems = {"whole": whole, "shorter": other, "halved": whole.but(value=whole.value / 2)}
    truths = {name: problem.truth()[0] for name, problem in problems.items()}
    for order in (("shorter", "whole", "halved", "nan", "whole"), ("halved", "nan", "shorter", "whole", "halved")):
        for index, name in enumerate(order):
            if name == "nan":
                subject.output(nan)
                gradients(subject, nan)
                continue
            what = Message("the output of {name}", name=Message(name))
            if index:
                what = Message("{what} after {before}", what=what, before=Message(order[index - 1]))
            near(what, subject.output(problems[name]), truths[name], dtype)
    want = truth_gradients(whole)
    for name, got in gradients(subject, whole).items():
        near(Message("the gradient of {name} after a call on NaN", name=name), got, want[name], dtype, "gradient")


@law(cases=_FEW, dtypes=_FLOAT32)
def callers(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """The result does not depend on the caller: it is also right in a thread without this package on its stack."""
    problem = case.problem(dtype, subject.device)
    want = problem.truth()[0]
    near("the output", subject.output(problem), want, dtype)
    near("the output in another thread", subject.output_in_thread(problem), want, dtype)


@law(cases=_FEW, dtypes=_FLOAT32)
def modes(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """The output is right with and without gradients, and so is the gradient if only one input requires it."""
    problem = case.problem(dtype, subject.device)
    want, want_gradients = problem.truth()[0], truth_gradients(problem)
    near("the output with gradients", subject.output(problem.leaves()), want, dtype)
    with torch.no_grad():
        near("the output without gradients", subject.output(problem.leaves()), want, dtype)
    with torch.inference_mode():
        near("the output in inference mode", subject.output(_copied(problem)), want, dtype)
    for name in _NAMES:
        leaf = getattr(problem, name).clone().requires_grad_()
        out = subject.output(problem.but(**{name: leaf}))
        holds(out.requires_grad, Message("if only the {name} requires a gradient, the output has none", name=name))
        near(Message("the output if only the {name} requires a gradient", name=name), out, want, dtype)
        (got,) = torch.autograd.grad(out, leaf, random_like(out, case.seed), materialize_grads=True, allow_unused=True)
        near(
            Message("the gradient if only the {name} requires one", name=name),
            got,
            want_gradients[name],
            dtype,
            "gradient",
        )


def _copied(problem: Problem) -> Problem:
    """Copy the problem's tensors, so that a law may change them."""
    return problem.but(**{name: getattr(problem, name).clone() for name in (*_NAMES, "allowed")})


def _twins(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """For each input, yield its name and problems in which two of its inner rows, or two entries, are swapped.

    The shapes, sums, norms, and first and last entries stay the same.
    """
    for name in _NAMES:
        x = getattr(problem, name)
        for change in _CHANGES:
            yield name, problem.but(**{name: change(x)})


def _swap_rows(x: Tensor) -> Tensor:
    order = torch.arange(x.shape[2], device=x.device)
    low, high = x.shape[2] // 3, x.shape[2] // 2
    order[low], order[high] = high, low
    return x[:, :, order]


def _swap_entries(x: Tensor) -> Tensor:
    """Swap the smallest and the largest entry of the middle row of each head."""
    other, middle = x.clone(), x.shape[2] // 2
    row = x[:, :, middle]
    ends = torch.stack([row.argmin(-1, keepdim=True), row.argmax(-1, keepdim=True)])
    other[:, :, middle] = row.scatter(-1, ends[0], row.gather(-1, ends[1])).scatter(
        -1, ends[1], row.gather(-1, ends[0])
    )
    return other


_CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (_swap_rows, _swap_entries)

# `determinism` runs on the cases of all laws, so `program_behaviour` lists it.
LAWS = (memory_of_calls, repeats, twins, order_of_calls, callers, modes)
