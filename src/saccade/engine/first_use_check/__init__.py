"""The first-use check, which compares a few rows of a compiled kernel's first result with the definition."""

from saccade.engine.first_use_check.registry import FirstUse, failed, holds, is_on, reasons, seen

__all__ = ["FirstUse", "failed", "holds", "is_on", "reasons", "seen"]
