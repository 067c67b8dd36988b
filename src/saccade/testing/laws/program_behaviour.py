"""Laws about the behaviour of an attention function as a program: side effects, strides, empty inputs, memory."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from saccade.masks import Causal, Window, sparse_transformer
from saccade.positions import ALiBi, ShawKeys
from saccade.scores import Additive
from saccade.support.language import Message
from saccade.testing.case import Case, seeded
from saccade.testing.kernel_under_test import Subject
from saccade.testing.largest_tensor import largest_tensor
from saccade.testing.laws import applicability
from saccade.testing.laws.backward import gradients, random_like
from saccade.testing.laws.expect import close, holds, identical, same
from saccade.testing.laws.law import law
from saccade.testing.problem import Problem


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


@law()
def determinism(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """Two identical calls give bitwise equal results."""
    problem = case.problem(dtype, subject.device)
    first, second = subject.output(problem), subject.output(problem)
    identical("the second output", second.nan_to_num(nan=0.0), first.nan_to_num(nan=0.0))


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


@law(
    cases=tuple(
        dataclasses.replace(case, name=f"{case.name}-without-{what}", batch=batch, q_len=q_len, kv_len=kv_len)
        for case in (
            Case("none"),
            Case("causal", Causal(), lambda b, h, q, kv: kv <= q),
            Case("sink", sink=True),
            Case("additive", score=seeded(lambda: Additive(8, 8, 3))),
            Case("relative", relative=seeded(lambda: ShawKeys(8, 2))),
        )
        for what, batch, q_len, kv_len in (("queries", 2, 0, 7), ("keys", 2, 7, 0), ("items", 0, 7, 7))
    )
)
def zero_lengths(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """Without queries, keys or batch items, the output has the right shape; without keys, it is 0."""
    problem = case.problem(dtype, subject.device)
    want, want_lse = problem.truth()
    close("the output", subject.output(problem), want, dtype)
    if "lse" in subject.offers:
        close("the lse", subject.output_and_lse(problem)[1], want_lse, dtype, "lse")
    for name, gradient in gradients(subject, problem).items():
        holds((gradient == 0).all(), Message("the gradient of {name} is not 0", name=name))


@law(
    where=(applicability.claims_memory,),
    cases=tuple(
        dataclasses.replace(
            case, batch=1, num_heads=1, num_kv_heads=1, q_len=length, kv_len=length, head_dim=2, value_dim=2
        )
        for length, case in (
            (1024, Case("full")),
            (1024, Case("causal", Causal())),
            (1024, Case("window", Window(64, 0))),
            (1024, Case("sparse", sparse_transformer(32))),
            (512, Case("relative", relative=ALiBi(1))),
            (512, Case("score", Window(64, 0), score=seeded(lambda: Additive(2, 2, 4)))),
        )
    ),
    dtypes=(torch.float32,),
)
def cost(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """Doubling the length does not make the largest tensor, forward or backward, grow faster than claimed."""
    claimed = subject.claims.memory_exponent or 0.0
    sizes = []
    for length in (case.q_len, 2 * case.q_len):
        problem = dataclasses.replace(case, q_len=length, kv_len=length).problem(dtype, subject.device)
        sizes.append(largest_tensor(partial(gradients, subject, problem)))
    exponent = math.log2(sizes[1] / sizes[0])
    sentence = Message(
        "the largest tensor grew from {before} to {after} bytes: length to the power {exponent:.2f}",
        before=sizes[0],
        after=sizes[1],
        exponent=exponent,
    )
    holds(exponent <= claimed + 0.25, Message("{sentence}, not {claimed:.2f}", sentence=sentence, claimed=claimed))


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

LAWS = (pure, determinism, strides, zero_lengths, cost)
