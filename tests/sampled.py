"""A sample of many alike: what CI tries of a long list."""

from collections.abc import Iterable
from typing import Any

import pytest

# Slow, since there are so many of them. Mutants of the code meet them all the same: each alone is quick.
MANY = (pytest.mark.slow, pytest.mark.many)


def sampled(every: Iterable[Any], step: int) -> list[Any]:
    """All of them as parameters of a test: each ``step``-th is always tried, the others among the slow tests."""
    return [param if number % step == 0 else _later(param) for number, param in enumerate(_params(every))]


def kept(every: Iterable[Any], *some: Any) -> list[Any]:
    """All of them as parameters of a test: those that begin with one of ``some`` are always tried, others are slow."""
    params = _params(every)
    assert all(any(param.values[0] == one for param in params) for one in some), f"{some} must be among the parameters"
    return [param if param.values[0] in some else _later(param) for param in params]


def _params(every: Iterable[Any]) -> list[Any]:
    return [one if isinstance(one, type(pytest.param())) else pytest.param(one) for one in every]


def _later(param: Any) -> Any:
    is_slow = any(mark.name == "slow" for mark in param.marks)  # for a reason of its own: it may take minutes
    return param if is_slow else param._replace(marks=(*param.marks, *MANY))
