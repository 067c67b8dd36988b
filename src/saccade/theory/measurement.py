"""Measurement: an expected number, a measured number, and a tolerance."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

Relation = Literal["=", "<=", ">=", "!="]

SIGMAS = 6.0
"""Standard errors that an average may be off. A normal average is further off with probability 2e-9; `estimate` states
1e-6, which leaves room for averages that are not normal."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A measured number and the number that it is compared with.

    Attributes:
        what: the quantity.
        relation: "=" within the tolerance, "<=" and ">=" up to it; "!=" further apart than it, which refutes a claim:
            then ``expected`` is the number of the claim.
        expected: the number to compare with.
        seen: the number measured.
        tolerance: largest difference allowed; for "!=", the smallest.
        why: the reason of the tolerance.
        chance: an upper bound on the probability that a right number fails; 0 without random estimates.
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
        """Whether the measured number agrees; never for NaN."""
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
    """Expect ``seen`` to equal ``expected``."""
    return Measurement(what, "=", float(expected), float(seen), tolerance, f"± {tolerance:.2g}, {why}")


def at_most(what: str, seen: float, bound: float, tolerance: float = 0.0) -> Measurement:
    """Expect ``seen`` to be at most ``bound``."""
    return Measurement(what, "<=", float(bound), float(seen), tolerance, _room(tolerance))


def at_least(what: str, seen: float, bound: float, tolerance: float = 0.0) -> Measurement:
    """Expect ``seen`` to be at least ``bound``."""
    return Measurement(what, ">=", float(bound), float(seen), tolerance, _room(tolerance))


def apart(what: str, seen: float, claimed: float, margin: float) -> Measurement:
    """Refute ``claimed`` by ``seen``, a counter-example that differs by more than ``margin``."""
    return Measurement(what, "!=", float(claimed), float(seen), margin, f"refuted if more than {margin:.2g} off")


def same(what: str, seen: Tensor, expected: Tensor, tolerance: float = 1e-12) -> Measurement:
    """Expect two tensors to be equal: compare the largest difference of their entries with 0."""
    return equal(f"{what}, largest difference", _farthest(seen, expected), 0.0, tolerance)


def differ(what: str, seen: Tensor, claimed: Tensor, margin: float) -> Measurement:
    """Refute the claim that two tensors are equal, by an entry that differs by more than ``margin``."""
    return apart(f"{what}, largest difference", _farthest(seen, claimed), 0.0, margin)


def estimate(what: str, samples: Tensor, expected: float, bias: float = 0.0) -> Measurement:
    """Expect the mean of samples to be ``expected``, within `SIGMAS` standard errors and a known ``bias``."""
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
