"""Marks of the tests that run the compiled kernel; `make levels` runs them at each level of the processor."""

import platform

import pytest

from saccade.engine.kernels.native import abilities

__all__ = ["NATIVE", "needs_native", "rounding"]

needs_native = pytest.mark.native
NATIVE = pytest.param("native", marks=needs_native)
IS_ARM = platform.machine() in ("aarch64", "arm64")
LANES = (4, 4) if IS_ARM else (4, 8, 16, 16, 16)  # floats in a register, at each level


def rounding(terms: int) -> float:
    """Return a bound of the relative error of a float32 sum of `terms` positive terms, each a product with an exp2.

    Each lane of a register adds its share of the terms one by one, and each addition rounds by at most 2**-24. A term
    itself errs by that of exp2 (1e-7) and of four roundings.
    """
    additions = terms / LANES[abilities() or 0]
    return (additions + 1e-7 * 2**24 + 4) * 2**-24
