"""Where a compiled kernel runs for the first time, a few of its rows are compared with the definition."""

from saccade.engine.kernel_check.registry import failed, holds, is_on, reasons, seen
from saccade.engine.kernel_check.result import FirstUse

__all__ = ["FirstUse", "failed", "holds", "is_on", "reasons", "seen"]
