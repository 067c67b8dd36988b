"""Laws at the sizes of real models. For each tensor and each row, they limit the norm of the error."""

import torch
from torch import Tensor

from saccade.support.language import Message
from saccade.testing.case import Case
from saccade.testing.drawn_cases import DRAWN_CASES, drawn
from saccade.testing.kernel_under_test import Subject
from saccade.testing.laws.backward import gradients, truth_gradients
from saccade.testing.laws.expect import CANCELLED, holds, near
from saccade.testing.laws.law import law
from saccade.testing.problem import Problem
from saccade.testing.size_cases import SHORT_CASES, SIZE_CASES

_DTYPES = (torch.float64, torch.float32, torch.bfloat16)
_OFFSETS = (-120.0, -6e4, 6e4)
_CHOSEN = (0, 62, 63, 64, 127, 128, -1)


@law(cases=SIZE_CASES, dtypes=_DTYPES)
def sizes(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """At the sizes of real models, the output matches the definition in the norm of the tensor and of every row."""
    problem = _packed(case.problem(dtype, subject.device))
    near("the output", subject.output(problem), problem.truth()[0], dtype)


@law(cases=SIZE_CASES, dtypes=_DTYPES)
def gradients_at_sizes(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """At the sizes of real models, gradients match the definition in the norm of the tensor and of every row."""
    problem = case.problem(dtype, subject.device)
    want = truth_gradients(problem)
    for name, got in gradients(subject, problem).items():
        near(Message("the gradient of {name}", name=name), got, want[name], dtype, "gradient")


@law(cases=DRAWN_CASES, dtypes=(torch.float32,))
def drawn_sizes(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """For random lengths, widths, heads and masks, the output and the gradients are those of the definition."""
    chosen = drawn(case)
    problem = chosen.problem(dtype, subject.device)
    shapes = " ".join(f"{name} {list(getattr(problem, name).shape)}" for name in ("query", "key", "value"))
    at = Message("for {shapes} under {mask}", shapes=shapes, mask=chosen.mask)
    near(Message("the output {at}", at=at), subject.output(problem), problem.truth()[0], dtype)
    want = truth_gradients(problem)
    for name, got in gradients(subject, problem).items():
        near(Message("the gradient of {name} {at}", name=name, at=at), got, want[name], dtype, "gradient")


@law(cases=SHORT_CASES, dtypes=(torch.float32,))
def gradients_of_rows(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """Backpropagation from a single output row gives the gradients of the definition, which are 0 for other queries.

    The rows are at block edges, or random. Backpropagation from a sum, with an upstream gradient of stride 0, is also
    checked.
    """
    problem = case.problem(dtype, subject.device)
    names, got, want = ("query", "key", "value"), problem.leaves(), problem.leaves()
    out, truth = subject.output(got), want.truth()[0]
    holds(out.requires_grad, "the output has no gradient with respect to the inputs")
    for name, our, their in zip(names, _pull_back(out.sum(), got), _pull_back(truth.sum(), want), strict=True):
        near(
            Message("the gradient of {name} from a sum", name=name),
            our,
            their,
            dtype,
            "gradient",
            slack=CANCELLED * torch.finfo(dtype).eps,
        )
    generator = torch.Generator().manual_seed(case.seed)
    random_row = int(torch.randint(case.q_len, (), generator=generator))
    edges = [row for row in _CHOSEN if row < case.q_len]
    for row in {random_row, edges[case.seed % len(edges)], edges[-1] % case.q_len}:
        ours, theirs = _pull_back(out[:, :, row].sum(), got), _pull_back(truth[:, :, row].sum(), want)
        for name, our, their in zip(names, ours, theirs, strict=True):
            what, rounding = (
                Message("the gradient of {name} from row {row}", name=name, row=row),
                CANCELLED * torch.finfo(dtype).eps,
            )
            near(what, our, their, dtype, "gradient", slack=rounding)  # if a row has only one key, its gradient is 0
        others = torch.arange(case.q_len, device=out.device) != row % case.q_len
        holds((ours[0][:, :, others] == 0).all(), Message("the gradient from row {row} reaches another query", row=row))


@law(cases=SHORT_CASES, dtypes=_DTYPES[:2])
def large_scores(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """The output is right for scores near -120, -60,000 or 60,000, which differ from small scores only by a constant.

    Masked pairs must stay masked next to such scores, so a kernel that gives them a score such as -1e4 fails.
    """
    problem = case.problem(dtype, subject.device)
    for offset in _OFFSETS:
        moved = _with_offset(problem, offset)
        rounding = 8 * abs(offset) * torch.finfo(dtype).eps
        what = Message("the output with scores near {offset:g}", offset=offset)
        near(what, subject.output(moved), moved.truth()[0], dtype, more=rounding)


def _pull_back(total: Tensor, problem: Problem) -> tuple[Tensor, ...]:
    inputs = (problem.query, problem.key, problem.value)
    return torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=True, materialize_grads=True)


def _packed(problem: Problem) -> Problem:
    """Make queries, keys and values views of one packed tensor, like the output of a fused projection.

    Tensors of different lengths or widths are left unchanged.
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
    """Replace one channel of queries and keys by constants that add ``offset`` to every score."""
    side = abs(offset * problem.query.shape[3] ** 0.5) ** 0.5
    query, key = problem.query.clone(), problem.key.clone()
    query[..., 0], key[..., 0] = side, side if offset > 0 else -side
    return problem.but(query=query, key=key)


LAWS = (sizes, gradients_at_sizes, drawn_sizes, gradients_of_rows, large_scores)
