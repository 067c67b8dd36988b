"""Marks of tests that ask for the compiled kernel by name, which runs where saccade-cpu is installed."""

import pytest

from saccade.engine.kernels.native import abilities

__all__ = ["NATIVE", "needs_half", "needs_native"]

needs_native = pytest.mark.skipif(abilities() is None, reason="needs saccade-cpu, which pip install ./native compiles")
needs_half = pytest.mark.skipif((abilities() or 0) < 3, reason="needs saccade-cpu, and a processor with bfloat16")
NATIVE = pytest.param("native", marks=needs_native)
