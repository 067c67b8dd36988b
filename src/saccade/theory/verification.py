"""Verify the claims: run their checks for one or more seeds and collect the findings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from saccade.support.errors import type_error
from saccade.support.validation import check_int
from saccade.theory.claim import Claim, Draw
from saccade.theory.claims import CLAIMS
from saccade.theory.measurement import Measurement

SCHEMA = "saccade.verification/2"
"""Name and version of the JSON format that `Verification.to_json` returns."""
_CLAIM_FIELDS = ("name", "topic", "statement", "latex", "source", "verdict", "conditions")  # in that format


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of verifying one claim with one seed.

    Attributes:
        claim: the claim.
        seed: the seed of the random numbers.
        measurements: the measurements, in order.
        is_random: whether the check drew random numbers.
        error: the error that the check raised; empty if none.
        missing: the message of the ImportError if the check needs a package that is not installed; otherwise empty.
    """

    claim: Claim
    seed: int
    measurements: tuple[Measurement, ...]
    is_random: bool
    error: str = ""
    missing: str = ""

    @property
    def agrees(self) -> bool:
        """Whether the claim was measured without an error, and all measurements agree with its verdict."""
        has_result = bool(self.measurements) and not self.error
        return has_result and all(measurement.agrees for measurement in self.measurements)


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `verify`, with the findings for each claim.

    Attributes:
        findings: one finding per claim and seed; a check without random numbers runs once.
    """

    findings: tuple[Finding, ...]

    @property
    def contradicted(self) -> tuple[Finding, ...]:
        """Findings that contradict the verdict of their claim."""
        return tuple(finding for finding in self.findings if not (finding.agrees or finding.missing))

    @property
    def unchecked(self) -> tuple[Finding, ...]:
        """Findings without a result because a package is missing."""
        return tuple(finding for finding in self.findings if finding.missing)

    @property
    def ok(self) -> bool:
        """Whether at least one claim was checked and no finding contradicts a verdict."""
        return len(self.findings) > len(self.unchecked) and not self.contradicted

    @property
    def chance(self) -> float:
        """An upper bound on the probability that a correct verdict is contradicted by chance."""
        return sum(measurement.chance for finding in self.findings for measurement in finding.measurements)

    def to_json(self) -> dict[str, Any]:
        """Return the verification as JSON values in the format `SCHEMA`; numbers that are not finite become strings."""
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "chance_of_false_alarm": self.chance,
            "claims": [
                {name: getattr(claim, name) for name in _CLAIM_FIELDS}
                | {"findings": [_finding_as_json(finding) for finding in self.findings if finding.claim is claim]}
                for claim in dict.fromkeys(finding.claim for finding in self.findings)
            ],
        }


def verify(
    claims: Sequence[Claim] | None = None,
    *,
    seed: int = 0,
    seeds: int = 1,
    progress: Callable[[Finding], None] | None = None,
) -> Verification:
    """Check whether measurements confirm the verdicts of claims.

    Args:
        claims: the claims to check; None means all.
        seed: the first seed.
        seeds: number of seeds, run in sequence. A check without random numbers runs for the first seed only.
        progress: a function called with each finding.

    Returns:
        A `Verification`.

    Raises:
        TypeError, ValueError: an element of ``claims`` is not a claim, or a number is not an int in its range.

    Cost: all claims take about a minute on one core. Half of that time is spent on training small layers, only for the
        first seed. Each further seed takes a quarter of a minute.

    Example:
        >>> from saccade import theory
        >>> theory.verify([theory.find("softmax-jacobian")]).ok
        True
    """
    claims = CLAIMS if claims is None else tuple(claims)
    wrong = [type(item).__name__ for item in claims if not isinstance(item, Claim)]
    if wrong:
        raise type_error("claims", "be claims of saccade.theory", ", ".join(wrong))
    check_int("seed", seed, 0)
    check_int("seeds", seeds)
    findings: list[Finding] = []
    deterministic: set[str] = set()
    for number in range(seed, seed + seeds):
        for claim in claims:
            if claim.name in deterministic:
                continue
            finding = _check_claim(claim, number)
            findings.append(finding)
            if not finding.is_random:
                deterministic.add(claim.name)
            if progress is not None:
                progress(finding)
    return Verification(tuple(findings))


def _check_claim(claim: Claim, seed: int) -> Finding:
    draw = Draw(seed, claim.name)
    try:
        measurements = claim.measure(draw)
    except ImportError as error:
        return Finding(claim, seed, (), draw.used, missing=" ".join(str(error).split()))
    except Exception as error:  # a check that fails to run confirms nothing
        return Finding(claim, seed, (), draw.used, f"{type(error).__name__}: {' '.join(str(error).split())}")
    return Finding(claim, seed, measurements, draw.used)


def _finding_as_json(finding: Finding) -> dict[str, Any]:
    return {
        "seed": finding.seed,
        "agrees": finding.agrees,
        "error": finding.error,
        "missing": finding.missing,
        "measurements": [
            dataclasses.asdict(measurement)
            | {
                "expected": _finite_or_text(measurement.expected),
                "seen": _finite_or_text(measurement.seen),
                "agrees": measurement.agrees,
            }
            for measurement in finding.measurements
        ],
    }


def _finite_or_text(number: float) -> float | str:
    return number if number - number == 0 else str(number)
