"""Where a compiled kernel runs for the first time, a few of its rows are compared with the definition."""

from saccade.engine.first_use.records import failed, holds, is_on, reasons, seen
from saccade.engine.first_use.verdict import FirstUse

__all__ = ["FirstUse", "failed", "holds", "is_on", "reasons", "seen"]
