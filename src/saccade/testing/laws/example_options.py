"""An example of each option, for problems that have none: seeded, so that it is the same every time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.positions import Bias, Clipped
from saccade.scores import Additive, Score
from saccade.testing.problem import Problem
from saccade.testing.seeded import seeded

__all__ = ["SOME", "some_bias", "some_relative", "some_score", "some_sink"]


def some_bias(problem: Problem) -> Tensor:
    """A bias of normal random numbers for every head, row and column."""
    rows, columns = problem.allowed.shape[2:]
    heads = problem.query.shape[1]
    generator = torch.Generator().manual_seed(2)
    return torch.randn(1, heads, rows, columns, generator=generator, dtype=torch.float64).to(problem.query)


def some_sink(problem: Problem) -> Tensor:
    """A logit for each head, some above and some below most scores."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(problem.query.shape[1], generator=generator, dtype=torch.float64).to(problem.query)


def some_score(problem: Problem) -> Score:
    """A score with parameters, which is no dot product."""
    score = seeded(lambda: Additive(problem.query.shape[3], problem.key.shape[3], 3))
    return score.to(problem.query).requires_grad_(False)


def some_relative(problem: Problem) -> Bias:
    """A relative bias with a number of its own for near distances, on both sides."""
    relative = seeded(lambda: Clipped(problem.query.shape[1], 3))
    return relative.to(problem.query).requires_grad_(False)


SOME: dict[str, Callable[[Problem], object]] = {
    "bias": some_bias,
    "scale": lambda problem: 0.5,
    "softcap": lambda problem: 2.0,
    "dropout_p": lambda problem: 0.5,
    "sink_logit": some_sink,
    "score": some_score,
    "relative": some_relative,
}
