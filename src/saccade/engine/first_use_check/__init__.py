"""The first-use check: when a compiled kernel runs for the first time, compare a few rows with the definition."""

from saccade.engine.first_use_check.results import FirstUse, failed, holds, is_on, reasons, seen

__all__ = ["FirstUse", "failed", "holds", "is_on", "reasons", "seen"]
