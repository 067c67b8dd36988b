"""Laws at the sizes of models, judged by the norm of every tensor and every row."""

import torch
from torch import Tensor

from saccade.testing.case import Case
from saccade.testing.laws.backward import gradients, random_like, truth_gradients
from saccade.testing.laws.expect import holds
from saccade.testing.laws.law import law
from saccade.testing.problem import Problem
from saccade.testing.size_cases import SIZE_CASES
from saccade.testing.subject import Subject
from saccade.testing.tolerances import Quantity, tolerance

_DTYPES = (torch.float64, torch.float32, torch.bfloat16)
_OFFSETS = (-120.0, -6e4, 6e4)
_SHORT = tuple(case for case in SIZE_CASES if case.q_len <= 257 and case.kv_len <= 257)


@law(cases=SIZE_CASES, dtypes=_DTYPES)
def sizes(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """At the sizes of models, the output is that of the definition, in the norm of the tensor and of every row."""
    problem = _packed(case.problem(dtype, subject.device))
    _near("the output", subject.output(problem), problem.truth()[0], dtype, "output")


@law(cases=SIZE_CASES, dtypes=_DTYPES)
def gradients_at_sizes(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """At the sizes of models, gradients are those of the definition, in the norm of the tensor and of every row."""
    problem = case.problem(dtype, subject.device)
    want = truth_gradients(problem)
    for name, got in gradients(subject, problem).items():
        _near(f"the gradient of {name}", got, want[name], dtype, "gradient")


@law(cases=_SHORT, dtypes=_DTYPES[:2])
def large_scores(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """Scores near -120, -60,000 or 60,000 give the output of the definition: they differ from small ones by a constant.

    A masked pair must stay masked next to them, so numbers such as -1e4 do not stand for it.
    """
    problem = case.problem(dtype, subject.device)
    for offset in _OFFSETS:
        moved = _with_offset(problem, offset)
        rounding = 8 * abs(offset) * torch.finfo(dtype).eps
        _near(
            f"the output with scores near {offset:g}",
            subject.output(moved),
            moved.truth()[0],
            dtype,
            "output",
            rounding,
        )


@law(cases=_SHORT[:6], dtypes=(torch.float32,))
def memory_of_calls(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """A result depends on the values of this call's inputs alone: not on earlier calls, their memory or their results.

    The inputs change in place between calls, and the memory of earlier results is overwritten.
    """
    first = case.problem(dtype, subject.device)
    problem = first.but(query=first.query.clone(), key=first.key.clone(), value=first.value.clone())
    inputs = {"query": problem.query, "key": problem.key, "value": problem.value}
    results = []
    for turn in range(3):
        for place, (name, x) in enumerate(inputs.items()):
            x.copy_(getattr(first, name) if turn != 1 else random_like(x, first.seed).roll(place))
        out = subject.output(problem)
        for name, x in inputs.items():
            shares = out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            holds(not shares, f"the output shares memory with the {name}")
        _near(f"the output of call {turn + 1} on the same memory", out, problem.truth()[0], dtype, "output")
        results.append(out)
        kept = out.clone()
        subject.output(first.but(value=first.value * 2))
        holds(torch.equal(out, kept), "a later call changes the result of an earlier one")
        if not out.requires_grad:
            out.fill_(torch.nan)


def _near(what: str, got: Tensor, want: Tensor, dtype: torch.dtype, quantity: Quantity, more: float = 0.0) -> None:
    """Raise `LawBroken` unless two tensors agree in the norm of the whole and of each row, relative to the reference.

    Rows are compared with their own norm or the root mean square of all rows, if that is larger.
    """
    holds(got.shape == want.shape, f"{what} has shape {list(got.shape)}, not {list(want.shape)}")
    got, want = got.detach().double(), want.detach().double()
    limit = tolerance(dtype, quantity) + more
    whole = float(torch.linalg.vector_norm(got - want) / torch.linalg.vector_norm(want).clamp_min(1e-30))
    holds(whole <= limit, f"{what} is off by {whole:.1e} of its norm, allowed {limit:.0e}")
    norms = torch.linalg.vector_norm(want, dim=-1)
    typical = norms.square().mean().sqrt()
    apart = torch.linalg.vector_norm(got - want, dim=-1) / norms.clamp_min(typical)
    place = [int(index) for index in torch.unravel_index(apart.argmax(), apart.shape)]
    worst = float(apart.max())
    holds(worst <= 4 * limit, f"{what} in row {place} is off by {worst:.1e} of its norm, allowed {4 * limit:.0e}")


def _packed(problem: Problem) -> Problem:
    """Return the problem with queries, keys and values as views of one tensor, as projections return them.

    Tensors of different lengths or widths are left as they are.
    """
    tensors = (problem.query, problem.key, problem.value)
    if len({x.shape[2:] for x in tensors}) > 1:
        return problem
    packed = torch.cat([x.transpose(1, 2).flatten(2) for x in tensors], 2)
    width, heads = problem.query.shape[3], [x.shape[1] for x in tensors]
    views = packed.split([width * count for count in heads], 2)
    query, key, value = (x.unflatten(2, (count, width)).transpose(1, 2) for x, count in zip(views, heads, strict=True))
    return problem.but(query=query, key=key, value=value)


def _with_offset(problem: Problem, offset: float) -> Problem:
    """Return the problem with a constant added to all scores, by one channel of queries and keys."""
    side = abs(offset * problem.query.shape[3] ** 0.5) ** 0.5
    query, key = problem.query.clone(), problem.key.clone()
    query[..., 0], key[..., 0] = side, side if offset > 0 else -side
    return problem.but(query=query, key=key)


LAWS = (sizes, gradients_at_sizes, large_scores, memory_of_calls)
