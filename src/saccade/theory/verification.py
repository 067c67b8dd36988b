"""Runs of claims, and their findings."""

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
"""Name and version of the form that `Verification.to_json` returns."""
_SAID = ("name", "topic", "statement", "latex", "source", "verdict", "conditions")  # of a claim, in that form


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one claim for one seed.

    Attributes:
        claim: the claim.
        seed: of its random numbers.
        measurements: in order.
        is_random: whether the check drew random numbers.
        error: raised by the check; empty if none.
        missing: a missing package that the check needs, as in the ImportError; empty if none.
    """

    claim: Claim
    seed: int
    measurements: tuple[Measurement, ...]
    is_random: bool
    error: str = ""
    missing: str = ""

    @property
    def agrees(self) -> bool:
        """Whether something was measured and all of it agrees with the verdict."""
        return not self.error and bool(self.measurements) and all(one.agrees for one in self.measurements)


@dataclasses.dataclass(frozen=True)
class Verification:
    """All findings of a run.

    Attributes:
        findings: one for each claim and seed; a check without random numbers runs once.
    """

    findings: tuple[Finding, ...]

    @property
    def contradicted(self) -> tuple[Finding, ...]:
        """Findings that contradict their claim's verdict."""
        return tuple(finding for finding in self.findings if not (finding.agrees or finding.missing))

    @property
    def unchecked(self) -> tuple[Finding, ...]:
        """Findings without a result because a package is missing."""
        return tuple(finding for finding in self.findings if finding.missing)

    @property
    def ok(self) -> bool:
        """Whether something was checked and nothing contradicts its verdict."""
        return len(self.findings) > len(self.unchecked) and not self.contradicted

    @property
    def chance(self) -> float:
        """An upper bound on the probability that chance contradicts a right verdict."""
        return sum(one.chance for finding in self.findings for one in finding.measurements)

    def to_json(self) -> dict[str, Any]:
        """Return the run as plain values, in the format `SCHEMA`; numbers that are not finite become text."""
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "chance_of_false_alarm": self.chance,
            "claims": [
                {name: getattr(claim, name) for name in _SAID}
                | {"findings": [_plain(finding) for finding in self.findings if finding.claim is claim]}
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
    """Check claims against their verdicts.

    Args:
        claims: to check; None means all.
        seed: the first seed.
        seeds: number of seeds, run in sequence. A check without random numbers runs for the first seed only.
        progress: called with each finding.

    Returns:
        A `Verification`.

    Raises:
        TypeError, ValueError: an argument that is no claim, or a number that is not an int in its range.

    Cost: all claims take about a minute on one core, half of it to train small layers, once, for the first seed;
        each further seed takes a quarter of a minute.

    Example:
        >>> from saccade import theory
        >>> theory.verify([theory.find("softmax-jacobian")]).ok
        True
    """
    claims = CLAIMS if claims is None else tuple(claims)
    wrong = [type(one).__name__ for one in claims if not isinstance(one, Claim)]
    if wrong:
        raise type_error("claims", "be claims of saccade.theory", ", ".join(wrong))
    check_int("seed", seed, 0)
    check_int("seeds", seeds)
    findings: list[Finding] = []
    settled: set[str] = set()
    for own in range(seed, seed + seeds):
        for one in claims:
            if one.name in settled:
                continue
            finding = _find(one, own)
            findings.append(finding)
            if not finding.is_random:
                settled.add(one.name)
            if progress is not None:
                progress(finding)
    return Verification(tuple(findings))


def _find(claim: Claim, seed: int) -> Finding:
    draw = Draw(seed, claim.name)
    try:
        measurements = claim.measure(draw)
    except ImportError as error:
        return Finding(claim, seed, (), draw.used, missing=" ".join(str(error).split()))
    except Exception as error:  # a check that cannot run confirms nothing
        return Finding(claim, seed, (), draw.used, f"{type(error).__name__}: {' '.join(str(error).split())}")
    return Finding(claim, seed, measurements, draw.used)


def _plain(finding: Finding) -> dict[str, Any]:
    return {
        "seed": finding.seed,
        "agrees": finding.agrees,
        "error": finding.error,
        "missing": finding.missing,
        "measurements": [
            dataclasses.asdict(one)
            | {"expected": _finite(one.expected), "seen": _finite(one.seen), "agrees": one.agrees}
            for one in finding.measurements
        ],
    }


def _finite(number: float) -> float | str:
    return number if number - number == 0 else str(number)
