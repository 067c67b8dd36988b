"""The first-use check: compare a few rows of a compiled kernel with the definition when it runs for the first time."""

from saccade.engine.kernel_check.registry import FirstUse, failed, holds, is_on, reasons, seen

__all__ = ["FirstUse", "failed", "holds", "is_on", "reasons", "seen"]
