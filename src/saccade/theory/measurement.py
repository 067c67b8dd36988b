"""The `Measurement` class (a measured and an expected number with a tolerance), and functions to build measurements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from saccade.support.language import Message, translated

Relation = Literal["=", "<=", ">=", "!="]

SIGMAS = 6.0
"""Number of standard errors by which an average may differ from its expected value.

A normal average differs by more with probability 2e-9. `estimate` states 1e-6, to allow for other distributions.
"""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A number measured to check a claim, and the number to compare it with.

    Attributes:
        what: the name of the quantity.
        relation: "=" (equal within the tolerance), "<=" or ">=" (a bound, up to the tolerance), or "!=" (further apart
            than the tolerance, which refutes a claim; ``expected`` is then the number that the claim states).
        expected: the number to compare with.
        seen: the measured number.
        tolerance: the largest difference allowed; for "!=", the smallest.
        why: the reason for the tolerance.
        chance: an upper bound on the probability that a correct number fails the comparison by chance. It is 0 for
            numbers that are not random estimates.
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
        """Whether the measured number satisfies its stated relation to the expected number; False for NaN."""
        if self.relation == "=":
            return abs(self.seen - self.expected) <= self.tolerance
        if self.relation == "!=":
            return abs(self.seen - self.expected) > self.tolerance
        excess = self.seen - self.expected if self.relation == "<=" else self.expected - self.seen
        return excess <= self.tolerance

    def __str__(self) -> str:
        seen = round(self.seen, 9) + 0.0 if self.agrees and abs(self.seen) < 1e-9 else self.seen  # rounding is noise
        values = {"what": translated(self.what), "seen": seen, "expected": self.expected, "why": translated(self.why)}
        words = {
            "=": "{what}: seen {seen:.4g}, expected {expected:.4g} ({why})",
            "<=": "{what}: seen {seen:.4g}, at most {expected:.4g} ({why})",
            ">=": "{what}: seen {seen:.4g}, at least {expected:.4g} ({why})",
            "!=": "{what}: seen {seen:.4g}, claimed {expected:.4g} ({why})",
        }[self.relation]
        return translated(words, **values)

    __repr__ = __str__


Measurements = Iterator[Measurement]
"""The measurements that the check of a claim yields."""


def equal(what: str, seen: float, expected: float, tolerance: float = 1e-12, why: str = "rounding") -> Measurement:
    """Build a measurement that expects ``seen`` to equal ``expected``."""
    return Measurement(
        what,
        "=",
        float(expected),
        float(seen),
        tolerance,
        Message("± {tolerance:.2g}, {why}", tolerance=tolerance, why=Message(why)),
    )


def at_most(what: str, seen: float, bound: float, tolerance: float = 0.0) -> Measurement:
    """Build a measurement that expects ``seen`` to be at most ``bound``."""
    return Measurement(what, "<=", float(bound), float(seen), tolerance, _bound_reason(tolerance))


def at_least(what: str, seen: float, bound: float, tolerance: float = 0.0) -> Measurement:
    """Build a measurement that expects ``seen`` to be at least ``bound``."""
    return Measurement(what, ">=", float(bound), float(seen), tolerance, _bound_reason(tolerance))


def apart(what: str, seen: float, claimed: float, margin: float) -> Measurement:
    """Build a measurement that refutes ``claimed`` if ``seen`` differs from it by more than ``margin``."""
    return Measurement(
        what, "!=", float(claimed), float(seen), margin, Message("refuted if more than {margin:.2g} off", margin=margin)
    )


def same(what: str, seen: Tensor, expected: Tensor, tolerance: float = 1e-12) -> Measurement:
    """Build a measurement that expects two tensors to be equal, by comparing their largest difference with 0."""
    return equal(
        Message("{what}, largest difference", what=Message(what)), _largest_difference(seen, expected), 0.0, tolerance
    )


def differ(what: str, seen: Tensor, claimed: Tensor, margin: float) -> Measurement:
    """Build a measurement that refutes the equality of two tensors if some entry differs by more than ``margin``."""
    return apart(
        Message("{what}, largest difference", what=Message(what)), _largest_difference(seen, claimed), 0.0, margin
    )


def estimate(what: str, samples: Tensor, expected: float, bias: float = 0.0) -> Measurement:
    """Build a measurement that expects the mean of samples to be ``expected``, within `SIGMAS` standard errors."""
    samples = samples.detach().double().flatten()
    error = float(samples.std() / samples.numel() ** 0.5)
    tolerance = SIGMAS * error + bias
    words = "± {tolerance:.2g}, {sigmas:.0f} standard errors of {count:,} samples"
    why = Message(words, tolerance=tolerance, sigmas=SIGMAS, count=samples.numel())
    mean = float(torch.mean(samples))
    return Measurement(what, "=", float(expected), mean, tolerance, why, chance=1e-6)


def _largest_difference(seen: Tensor, expected: Tensor) -> float:
    return float((seen.detach() - expected.detach()).abs().max()) if seen.shape == expected.shape else math.inf


def _bound_reason(tolerance: float) -> str:
    return Message("+ {tolerance:.2g}, rounding", tolerance=tolerance) if tolerance else "bound"
