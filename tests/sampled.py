"""A sample of many alike: what CI tries of a long list."""

from collections.abc import Iterable
from typing import Any

import pytest

# Slow, since there are so many of them. Mutants of the code meet them all the same: each alone is quick.
MANY = (pytest.mark.slow, pytest.mark.many)


def sampled(every: Iterable[Any], step: int) -> list[Any]:
    """All of them as parameters of a test: each ``step``-th is always tried, the others among the slow tests."""
    params = [one if isinstance(one, type(pytest.param())) else pytest.param(one) for one in every]
    return [
        param if number % step == 0 else param._replace(marks=(*param.marks, *MANY))
        for number, param in enumerate(params)
    ]
