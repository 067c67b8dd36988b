"""Laws about values that random tests do not contain: constants, ties, tiny and huge numbers, a single dominant key."""

from collections.abc import Callable

import torch

from saccade.support.language import Message
from saccade.testing.case import Case
from saccade.testing.kernel_under_test import Subject
from saccade.testing.laws.expect import near
from saccade.testing.laws.law import law
from saccade.testing.problem import Problem
from saccade.testing.size_cases import SHORT_CASES

_CASES = tuple(SHORT_CASES[index] for index in (0, 1, 2, 5, -5, -3))


@law(cases=_CASES, dtypes=(torch.float64, torch.float32))
def unusual_values(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """The output is right for inputs that are constant, exactly tied, tiny, huge or of very different magnitudes."""
    for kind, change in _KINDS.items():
        problem = change(case.problem(dtype, subject.device))
        out, (want, lse) = subject.output(problem), problem.truth()
        # A score of size s is rounded by s units, and the rounding of the whole sum is a few times that.
        largest = torch.where(problem.sees_something, lse, 0.0).abs().max()
        rounding = 8 * float(largest) * torch.finfo(dtype).eps
        slack = 2 * torch.finfo(dtype).tiny  # values and results below the normal range may become 0
        near(Message("the output for {kind}", kind=Message(kind)), out, want, dtype, more=rounding, slack=slack)


@law(cases=_CASES, dtypes=(torch.float64, torch.float32))
def wide_values(subject: Subject, case: Case, dtype: torch.dtype) -> None:
    """If channels of the values differ by factors of up to 2 ** 40, each channel is as accurate as alone."""
    problem = case.problem(dtype, subject.device)
    powers = torch.linspace(-20, 20, problem.value.shape[3], device=problem.value.device)
    factors = 2.0 ** powers.round().to(dtype)
    wide = problem.but(value=problem.value * factors)
    got, want = subject.output(wide) / factors, problem.truth()[0]
    near("the output, each channel divided by its size", got, want, dtype)
    for channel in (0, got.shape[3] // 2, got.shape[3] - 1):
        here = slice(channel, channel + 1)
        near(Message("channel {channel} of the output", channel=channel), got[..., here], want[..., here], dtype)


def _zero_queries(problem: Problem) -> Problem:
    return problem.but(query=torch.zeros_like(problem.query))


def _constants(problem: Problem) -> Problem:
    inputs = {"query": 0.5, "key": -0.25, "value": 0.75}
    return problem.but(**{name: torch.full_like(getattr(problem, name), number) for name, number in inputs.items()})


def _ties(problem: Problem) -> Problem:
    """Round queries and keys to small integers, so that many scores are equal."""
    return problem.but(query=problem.query.sign(), key=problem.key.round().clamp(-1, 1))


def _tiny_values(problem: Problem) -> Problem:
    return problem.but(value=problem.value * (16 * torch.finfo(problem.value.dtype).tiny))


def _huge_values(problem: Problem) -> Problem:
    return problem.but(value=problem.value * 1e30)


def _spread_scores(problem: Problem) -> Problem:
    """Scale the scores to several hundred, so that one key takes nearly all the weight of a row."""
    return problem.but(query=problem.query * 60)


def _mixed_keys(problem: Problem) -> Problem:
    """Multiply every third key by 100, and divide all other keys by 1,000."""
    long = torch.arange(problem.key.shape[2], device=problem.key.device)[:, None] % 3 == 0
    return problem.but(key=torch.where(long, problem.key * 100, problem.key / 1000))


def _sparse(problem: Problem) -> Problem:
    """Set most entries of all inputs to 0."""
    inputs = {name: getattr(problem, name) for name in ("query", "key", "value")}
    return problem.but(**{name: torch.where(x > 1.5, x, 0.0) for name, x in inputs.items()})


def _last_key(problem: Problem) -> Problem:
    """Make the last key match all queries, so that the weights of all other keys vanish."""
    key = torch.zeros_like(problem.key)
    key[:, :, -1] = 30.0
    return problem.but(query=problem.query.abs() + 1, key=key)


_KINDS: dict[str, Callable[[Problem], Problem]] = {
    "queries of 0": _zero_queries,
    "constant inputs": _constants,
    "tied scores": _ties,
    "values below the normal range": _tiny_values,
    "values of 1e30": _huge_values,
    "scores of several hundred": _spread_scores,
    "keys of very different norms": _mixed_keys,
    "inputs that are mostly 0": _sparse,
    "a last key that takes all the weight": _last_key,
}

LAWS = (unusual_values, wide_values)
