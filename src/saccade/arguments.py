"""What counts as a whole number and as a number where users hand one over."""

from __future__ import annotations

import sys
from numbers import Integral, Real
from typing import TypeGuard

__all__ = ["is_finite_number", "is_integer", "is_number"]


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number: an int or one of NumPy's; True and False are none."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number: an int, a float or one of NumPy's; True and False are none."""
    return type(value) in (int, float) or (isinstance(value, Real) and not isinstance(value, bool))


def is_finite_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number that a float can hold; an int may be larger than any."""
    return is_number(value) and abs(int(value) if is_integer(value) else float(value)) <= sys.float_info.max
