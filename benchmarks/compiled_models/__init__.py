"""Compile, export and translate small models with random weights, and compare with the models themselves and SDPA."""

from benchmarks.compiled_models.rows import ROWS
from benchmarks.compiled_models.trials import TRIALS, judge

__all__ = ["ROWS", "TRIALS", "judge"]
