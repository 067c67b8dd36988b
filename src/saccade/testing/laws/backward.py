"""Backward passes for laws: gradients of a randomly weighted sum of outputs, for the subject and the definition."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from saccade.testing.kernel_under_test import Subject
from saccade.testing.laws.expect import holds
from saccade.testing.problem import Problem

Through = Literal["out", "lse"]
Gradients = dict[str, Tensor]


def random_like(x: Tensor, seed: int) -> Tensor:
    """Draw random weights for a backward pass from a problem's seed, with the shape and dtype of ``x``."""
    generator = torch.Generator().manual_seed(seed + 1)  # a problem's tensors are drawn from the seed itself
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
    """Return the gradients of a randomly weighted sum of the subject's outputs, by the name of the input.

    Args:
        subject: the function under test.
        problem: the inputs of the function.
        rows: the rows of the output to include, bool ``[batch, heads, q_len]``; if None, all rows.
        through: the quantity to differentiate: the output, or the lse of rows with a visible key.
        bias: include the gradient of the bias.
        parameters: include the gradients of the parameters of sink, score and relative bias.
    """
    leaves = problem.leaves(bias=bias, parameters=parameters)
    if through == "out":
        return _pull_back(leaves, subject.output, rows)
    return _pull_back(leaves, lambda p: subject.output_and_lse(p)[1], problem.sees_something)


def truth_gradients(
    problem: Problem, *, through: Through = "out", bias: bool = False, parameters: bool = False
) -> Gradients:
    """Compute the expected gradients from the reference definition, in float64."""
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
    holds(result.requires_grad, "the output has no gradient with respect to the inputs")
    # Round to the dtype of the inputs, so that the definition and the subject use equal weights.
    weights = random_like(result, leaves.seed).to(leaves.query.dtype)
    if rows is not None:
        # Select rows instead of multiplying by zero, because the other rows may be infinite.
        result, weights = result[rows], weights[rows]
    total = (result.double() * weights.double()).sum()
    by_input = torch.autograd.grad(total, list(named.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(named, by_input, strict=True))
