"""Laws about memory: strides, parts of larger tensors, uninitialised memory, and tensors that must stay unchanged."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from saccade.support.language import Message
from saccade.testing.case import Case
from saccade.testing.kernel_under_test import Subject
from saccade.testing.laws import applicability
from saccade.testing.laws.backward import gradients, random_like, truth_gradients
from saccade.testing.laws.expect import holds, identical, near, same
from saccade.testing.laws.law import law
from saccade.testing.problem import Problem
from saccade.testing.size_cases import SHORT_CASES

_NAMES = ("query", "key", "value")
_FLOAT32 = (torch.float32,)


@law()
def pure(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """The inputs are bitwise unchanged after the call."""
    problem = case.problem(dtype, subject.device)
    tensors = {"query": problem.query, "key": problem.key, "value": problem.value, "mask": problem.allowed}
    tensors |= problem.positions
    if problem.bias is not None:
        tensors["bias"] = problem.bias
    tensors |= problem.parameters()
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    subject.output(problem)
    for name, tensor in tensors.items():
        identical(Message("after the call, {name}", name=name), tensor, copies[name])


@law(where=(applicability.has_queries_and_keys,))
def strides(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """Transposed, sliced and expanded inputs and gradients give the same results as contiguous copies."""
    problem = case.problem(dtype, subject.device)
    tensors = {"query": problem.query, "key": problem.key, "value": problem.value, "allowed": problem.allowed}
    tensors |= {} if problem.bias is None else {"bias": problem.bias}
    for how, layout in _LAYOUTS.items():
        laid = problem.but(**{name: layout(tensor) for name, tensor in tensors.items()})
        plain = problem.but(**{name: getattr(laid, name).contiguous() for name in tensors})
        if problem.sink_logit is not None:
            laid = laid.but(sink_logit=_sliced(problem.sink_logit))
        same(
            Message("the output for {how} inputs", how=Message(how)), subject.output(laid), subject.output(plain), dtype
        )
        upstream = layout(
            random_like(problem.query.new_empty(*problem.query.shape[:3], problem.value.shape[3]), case.seed)
        )
        got, want = _pull_back(subject, laid, upstream), _pull_back(subject, plain, upstream.contiguous())
        for name in ("query", "key", "value"):
            same(
                Message("the gradient of a {how} {name}", how=Message(how), name=name),
                got[name],
                want[name],
                dtype,
                "gradient",
            )


@law(cases=SHORT_CASES, dtypes=_FLOAT32)
def layouts(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """If inputs are views of larger tensors, the output is right, and memory around the views is not used or changed.

    The views are parts of a cache that is longer than the sequence, rows with padding, every other batch item, and
    parts of tensors with tokens before heads. All other entries of the larger tensors are NaN.
    """
    problem = case.problem(dtype, subject.device)
    want = problem.truth()[0]
    for how, copy_into in _BUFFERS.items():
        larger, parts = zip(*(copy_into(getattr(problem, name)) for name in _NAMES), strict=True)
        before = [x.isnan().sum() for x in larger]
        out = subject.output(problem.but(**dict(zip(_NAMES, parts, strict=True))))
        near(Message("the output for {how}", how=Message(how)), out, want, dtype)
        for name, x, part, count in zip(_NAMES, larger, parts, before, strict=True):
            identical(
                Message("after the call on {how}, {name}", how=Message(how), name=name), part, getattr(problem, name)
            )
            holds(
                x.isnan().sum() == count,
                Message("a call on {how} writes outside the {name}", how=Message(how), name=name),
            )


@law(cases=SHORT_CASES, dtypes=_FLOAT32)
def unwritten(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """Results do not depend on uninitialised memory: all memory that the function allocates begins as NaN."""
    problem = case.problem(dtype, subject.device)
    want, want_gradients = problem.truth()[0], truth_gradients(problem)
    with _memory_of_nan(problem):
        near("the output in memory of NaN", subject.output(problem), want, dtype)
        for name, got in gradients(subject, problem).items():
            near(
                Message("the gradient of {name} in memory of NaN", name=name),
                got,
                want_gradients[name],
                dtype,
                "gradient",
            )


@law(cases=SHORT_CASES, dtypes=_FLOAT32)
def untouched(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """The forward and backward passes do not change the inputs, the mask, the output or the incoming gradient.

    A second backward pass gives the same gradients.
    """
    problem = case.problem(dtype, subject.device).leaves()
    tensors = {name: getattr(problem, name) for name in (*_NAMES, "allowed")}
    out = subject.output(problem)
    holds(out.requires_grad, "the output has no gradient with respect to the inputs")
    tensors |= {"output": out, "upstream gradient": random_like(out, case.seed)}
    copies = {name: x.detach().clone() for name, x in tensors.items()}
    inputs, upstream = [tensors[name] for name in _NAMES], tensors["upstream gradient"]
    passes = [
        torch.autograd.grad(out, inputs, upstream, retain_graph=True, allow_unused=True, materialize_grads=True)
        for _ in range(2)
    ]
    for name, x in tensors.items():
        identical(Message("after the backward pass, the {name}", name=name), x, copies[name])
    for name, first, second in zip(_NAMES, *passes, strict=True):
        near(
            Message("the gradient of {name} in a second backward pass", name=name),
            second,
            first.double(),
            dtype,
            "gradient",
        )


def _pull_back(subject: Subject, problem: Problem, upstream: Tensor) -> dict[str, Tensor]:
    """Compute the gradients with respect to the strided inputs themselves, not to contiguous copies."""
    names = ("query", "key", "value")
    roots = {name: getattr(problem, name).detach().requires_grad_() for name in names}
    out = subject.output(problem.but(**roots))
    by_input = torch.autograd.grad(out, list(roots.values()), upstream, allow_unused=True, materialize_grads=True)
    return dict(zip(names, by_input, strict=True))


def _transposed(x: Tensor) -> Tensor:
    """Give the tensor the strides of a ``[batch, len, heads, dim]`` tensor, like the output of a projection."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _last_transposed(x: Tensor) -> Tensor:
    """Give the tensor strides that make its last axis non-contiguous."""
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def _sliced(x: Tensor) -> Tensor:
    """Copy the tensor to every other element of a larger tensor, from an odd offset, and return that view."""
    larger = x.new_zeros(tuple(2 * size + 3 for size in x.shape))
    view = larger[tuple(slice(3, None, 2) for _ in x.shape)]
    return view.copy_(x)


def _expanded(x: Tensor) -> Tensor:
    """Expand the tensor's first batch item to the full batch, with a stride of 0."""
    return x[:1].expand_as(x)


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": _transposed,
    "column-wise": _last_transposed,
    "sliced": _sliced,
    "expanded": _expanded,
}


def _in_cache(x: Tensor) -> tuple[Tensor, Tensor]:
    """Copy ``x`` into a longer NaN tensor, like a partly filled cache; return it and its slice that holds ``x``."""
    larger = x.new_full((x.shape[0], x.shape[1], x.shape[2] + 71, x.shape[3]), torch.nan)
    return larger, larger[:, :, : x.shape[2]].copy_(x)


def _in_wide_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Copy ``x`` into a NaN tensor with longer rows, at an offset; return it and its slice that holds ``x``."""
    larger = x.new_full((*x.shape[:3], x.shape[3] + 24), torch.nan)
    return larger, larger[..., 8 : 8 + x.shape[3]].copy_(x)


def _every_other_item(x: Tensor) -> tuple[Tensor, Tensor]:
    """Copy ``x`` to the odd items of a NaN tensor with twice the batch size; return it and these items."""
    larger = x.new_full((2 * x.shape[0], *x.shape[1:]), torch.nan)
    return larger, larger[1::2].copy_(x)


def _tokens_first(x: Tensor) -> tuple[Tensor, Tensor]:
    """Copy ``x`` into a larger NaN tensor ``[batch, len, heads, width]``; return it and its slice that holds ``x``."""
    batch, heads, length, width = x.shape
    larger = x.new_full((batch, length + 5, heads + 2, width), torch.nan)
    return larger, larger[:, 3 : 3 + length, 1 : 1 + heads].transpose(1, 2).copy_(x)


_BUFFERS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "a cache that is not full": _in_cache,
    "rows with padding": _in_wide_rows,
    "every other item": _every_other_item,
    "tokens before heads": _tokens_first,
}


@contextmanager
def _memory_of_nan(problem: Problem) -> Iterator[None]:
    """Context manager that makes newly allocated memory contain NaN.

    Torch fills the tensors that it allocates. For other allocations, which often reuse memory, tensors of the problem's
    shapes are first filled with NaN and freed.
    """
    filled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # torch replaces this module by an object with properties
    fill = memory.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about operations without a deterministic implementation
        try:
            memory.fill_uninitialized_memory = True
            torch.use_deterministic_algorithms(True, warn_only=True)
            shape = (*problem.query.shape[:3], problem.value.shape[3])
            for x in (problem.query, problem.key, problem.value, problem.value.new_zeros(shape)):
                _ = [torch.full_like(x, torch.nan) for _ in range(4)]  # freed at once, for memory torch does not fill
            yield
        finally:
            torch.use_deterministic_algorithms(filled, warn_only=warns)
            memory.fill_uninitialized_memory = fill


# `pure` and `strides` run on the cases of all laws, so `program_behaviour` lists them.
LAWS = (layouts, unwritten, untouched)
