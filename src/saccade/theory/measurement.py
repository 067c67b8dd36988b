"""Measurement: what was expected, what was seen, and how far apart the two may be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "SIGMAS",
    "Measurement",
    "Measurements",
    "Relation",
    "apart",
    "at_least",
    "at_most",
    "differ",
    "equal",
    "estimate",
    "same",
]

Relation = Literal["=", "<=", ">=", "!="]

SIGMAS = 6.0
"""Standard errors that an average may be off. A normal average is further off with probability 2e-9; `estimate` states
1e-6, which leaves room for averages that are not normal."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One number, beside the number that it ought to be.

    Attributes:
        what: the quantity.
        relation: "=" within the tolerance, "<=" and ">=" up to it; "!=" further apart than it, which is how a claim is
            refuted: ``expected`` is then what the claim says.
        expected: the number to compare with.
        seen: the number measured.
        tolerance: how far off it may be; for "!=", how far off it must be.
        why: where the tolerance comes from.
        chance: an upper bound on the probability that a right number fails; 0 where nothing is estimated.
    """

    what: str
    relation: Relation
    expected: float
    seen: float
    tolerance: float
    why: str
    chance: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether what was seen is what it ought to be; never for NaN."""
        if self.relation == "=":
            return abs(self.seen - self.expected) <= self.tolerance
        if self.relation == "!=":
            return abs(self.seen - self.expected) > self.tolerance
        excess = self.seen - self.expected if self.relation == "<=" else self.expected - self.seen
        return excess <= self.tolerance

    def __str__(self) -> str:
        sign = {"=": "expected", "<=": "at most", ">=": "at least", "!=": "claimed"}[self.relation]
        seen = round(self.seen, 9) + 0.0 if self.agrees and abs(self.seen) < 1e-9 else self.seen  # rounding is noise
        return f"{self.what}: seen {seen:.4g}, {sign} {self.expected:.4g} ({self.why})"


Measurements = Iterator[Measurement]
"""What a check yields."""


def equal(what: str, seen: float, expected: float, tolerance: float = 1e-12, why: str = "rounding") -> Measurement:
    """``seen`` ought to be ``expected``."""
    return Measurement(what, "=", float(expected), float(seen), tolerance, f"± {tolerance:.2g}, {why}")


def at_most(what: str, seen: float, bound: float, tolerance: float = 0.0) -> Measurement:
    """``seen`` ought not to be above ``bound``."""
    return Measurement(what, "<=", float(bound), float(seen), tolerance, _room(tolerance))


def at_least(what: str, seen: float, bound: float, tolerance: float = 0.0) -> Measurement:
    """``seen`` ought not to be below ``bound``."""
    return Measurement(what, ">=", float(bound), float(seen), tolerance, _room(tolerance))


def apart(what: str, seen: float, claimed: float, margin: float) -> Measurement:
    """The claim says ``claimed``; ``seen`` is a counter-example, further off than ``margin``."""
    return Measurement(what, "!=", float(claimed), float(seen), margin, f"refuted if more than {margin:.2g} off")


def same(what: str, seen: Tensor, expected: Tensor, tolerance: float = 1e-12) -> Measurement:
    """Two tensors ought to be equal: the largest difference of their entries ought to be 0."""
    return equal(f"{what}, largest difference", _farthest(seen, expected), 0.0, tolerance)


def differ(what: str, seen: Tensor, claimed: Tensor, margin: float) -> Measurement:
    """The claim says that two tensors are equal; some entry is a counter-example, further off than ``margin``."""
    return apart(f"{what}, largest difference", _farthest(seen, claimed), 0.0, margin)


def estimate(what: str, samples: Tensor, expected: float, bias: float = 0.0) -> Measurement:
    """The mean of samples ought to be ``expected``, within `SIGMAS` standard errors and a known ``bias``."""
    samples = samples.detach().double().flatten()
    error = float(samples.std() / samples.numel() ** 0.5)
    tolerance = SIGMAS * error + bias
    why = f"± {tolerance:.2g}, {SIGMAS:.0f} standard errors of {samples.numel():,} samples"
    mean = float(torch.mean(samples))
    return Measurement(what, "=", float(expected), mean, tolerance, why, chance=1e-6)


def _farthest(seen: Tensor, expected: Tensor) -> float:
    return float((seen.detach() - expected.detach()).abs().max()) if seen.shape == expected.shape else math.inf


def _room(tolerance: float) -> str:
    return f"+ {tolerance:.2g}, rounding" if tolerance else "bound"
