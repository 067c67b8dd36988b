"""Backward pass for laws: gradients of a randomly weighted answer, of the subject or of the definition."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from saccade.testing.laws.expect import holds
from saccade.testing.problem import Problem
from saccade.testing.subject import Subject

Through = Literal["out", "lse"]
Gradients = dict[str, Tensor]
_SEED = 1


def random_like(x: Tensor) -> Tensor:
    """Return random weights for a backward pass, like a tensor in shape and dtype, the same on every call."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device, x.dtype)


def gradients(
    subject: Subject,
    problem: Problem,
    rows: Tensor | None = None,
    *,
    through: Through = "out",
    bias: bool = False,
    parameters: bool = False,
) -> Gradients:
    """Run the subject backward: gradients of its randomly weighted answer, by name of the input.

    Args:
        subject: the function under test.
        problem: its inputs.
        rows: bool ``[batch, heads, q_len]``, the weighted rows; None means all.
        through: the output, or the lse of rows with a visible key.
        bias: include the bias.
        parameters: include the parameters of sink, score and relative bias.
    """
    leaves = problem.leaves(bias=bias, parameters=parameters)
    if through == "out":
        return _pull_back(leaves, subject.output, rows)
    return _pull_back(leaves, lambda p: subject.output_and_lse(p)[1], problem.sees_something)


def truth_gradients(
    problem: Problem, *, through: Through = "out", bias: bool = False, parameters: bool = False
) -> Gradients:
    """Run the definition backward in float64: the gradients that `gradients` must equal."""
    leaves = problem.leaves(bias=bias, parameters=parameters)
    if through == "out":
        return _pull_back(leaves, lambda p: p.truth()[0], None)
    return _pull_back(leaves, lambda p: p.truth()[1], problem.sees_something)


def _pull_back(leaves: Problem, answer: Callable[[Problem], Tensor], rows: Tensor | None) -> Gradients:
    named = {"query": leaves.query, "key": leaves.key, "value": leaves.value}
    if leaves.bias is not None:
        named["bias"] = leaves.bias
    named = {name: tensor for name, tensor in (named | leaves.parameters()).items() if tensor.requires_grad}
    result = answer(leaves)
    holds(result.requires_grad, "the answer does not depend differentiably on the inputs")
    # Round to the dtype of the inputs, so that definition and subject use equal weights.
    weights = random_like(result).to(leaves.query.dtype)
    if rows is not None:
        # Select instead of multiplying by zero: unweighted rows may be infinite.
        result, weights = result[rows], weights[rows]
    total = (result.double() * weights.double()).sum()
    by_input = torch.autograd.grad(total, list(named.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(named, by_input, strict=True))
