"""Comparison of a few rows with the definition, when a compiled kernel runs for the first time."""

from saccade.engine.kernel_check.registry import failed, holds, is_on, reasons, seen
from saccade.engine.kernel_check.result import FirstUse

__all__ = ["FirstUse", "failed", "holds", "is_on", "reasons", "seen"]
