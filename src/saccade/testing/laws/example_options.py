"""Example options for laws: a seeded value for each option, to add to problems that do not use the option."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.positions import Bias, Clipped
from saccade.scores import Additive, Score
from saccade.testing.case import seeded
from saccade.testing.problem import Problem


def some_bias(problem: Problem) -> Tensor:
    """Return an example of the option ``bias`` with a random value for every head, row and column."""
    rows, columns = problem.allowed.shape[2:]
    heads = problem.query.shape[1]
    generator = torch.Generator().manual_seed(2)
    return torch.randn(1, heads, rows, columns, generator=generator, dtype=torch.float64).to(problem.query)


def some_sink(problem: Problem) -> Tensor:
    """Return an example of the option ``sink_logit`` with one random logit per head."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(problem.query.shape[1], generator=generator, dtype=torch.float64).to(problem.query)


def some_score(problem: Problem) -> Score:
    """Return an example of the option ``score`` that has parameters and is not a dot product."""
    score = seeded(lambda: Additive(problem.query.shape[3], problem.key.shape[3], 3))
    return score.to(problem.query).requires_grad_(False)


def some_relative(problem: Problem) -> Bias:
    """Return an example of a relative bias that is a table of values for small distances in both directions."""
    relative = seeded(lambda: Clipped(problem.query.shape[1], 3))
    return relative.to(problem.query).requires_grad_(False)


EXAMPLES: dict[str, Callable[[Problem], object]] = {
    "bias": some_bias,
    "scale": lambda problem: 0.5,
    "softcap": lambda problem: 2.0,
    "dropout_p": lambda problem: 0.5,
    "sink_logit": some_sink,
    "score": some_score,
    "relative": some_relative,
}
