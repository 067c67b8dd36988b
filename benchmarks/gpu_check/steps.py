"""The steps of the check in the order in which they run, with the seconds that each may take.

This file and the runner import nothing but Python's standard library: a broken torch is a result, not a crash.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from benchmarks.gpu_check.device import Device

__all__ = ["ROOT", "STEPS", "Context", "Level", "Step", "level_of"]

ROOT = Path(__file__).parents[2]
Level = Literal["cuda", "cpu", "quick"]


class Step(NamedTuple):
    """A step: a module of this package with a function `measure`."""

    name: str
    title: str
    seconds: float


STEPS = (
    Step("environment", "versions, card, clocks, imports", 20),
    Step("canaries", "known bugs of torch, which the check of first use must flag", 45),
    Step("laws", "tests for a GPU, and the laws over sdpa, varlen, tiled and flex", 90),
    Step("numbers", "outputs and gradients at real sizes against float64", 90),
    Step("speed", "time beside torch's own backends", 120),
    Step("memory", "growth of memory, and statistics of long sequences", 45),
    Step("models", "whole models of transformers", 90),
    Step("cpu_kernel", "the compiled CPU kernel on this machine's cores", 60),
)


class Context(NamedTuple):
    """The circumstances of a step.

    Attributes:
        device: the GPU, or the processor that stands in for it in a rehearsal.
        level: which table of sizes to use.
        ends: when the step should be finished, on the clock of `time.monotonic`.
        wheel: a wheel of saccade-cpu to use where there is no compiler.
    """

    device: Device
    level: Level
    ends: float
    wheel: Path | None = None

    def left(self) -> float:
        """Return the seconds until the step should be finished."""
        return self.ends - time.monotonic()


def level_of(device: str, *, quick: bool) -> Level:
    """Return which table of sizes a run uses."""
    return "quick" if quick else "cuda" if device == "cuda" else "cpu"
