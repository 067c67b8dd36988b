"""CounterExample: a pair of tokens, or two runs, that contradict a rule. ClaimResult: the verdict on one claim."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Verdict = Literal["held", "broken", "not answered"]
Kind = Literal["leak", "blind", "differs"]


@dataclasses.dataclass(frozen=True)
class CounterExample:
    """One counter-example.

    Attributes:
        kind: "leak" (an output depends on a token that the rule hides from it), "blind" (it does not depend on one that
            it should), "differs" (two equivalent runs differ).
        row: batch item and place of the output.
        key: batch item and place of the token; None if runs differ.
        size: size of the effect: a change by the root mean square of all outputs, a gradient by the median of
            the allowed ones; 0 for "blind".
        module: name of the module where it first appears; empty if that is not known.
        probe: the probe that detected it.
        passes: forward and backward passes until then.
        nouns: names of the row and the token; "source" and "target" in an encoder-decoder.
    """

    kind: Kind
    row: tuple[int, int]
    key: tuple[int, int] | None
    size: float
    module: str = ""
    probe: str = ""
    passes: int = 0
    nouns: tuple[str, str] = ("output", "token")

    @property
    def pair(self) -> str:
        """The pair in words."""
        row = f"{self.nouns[0]} {self.row[1]}" + (
            f" of item {self.row[0]}" if self.row[0] or (self.key or (0,))[0] else ""
        )
        if self.key is None:
            return row
        key = f"{self.nouns[1]} {self.key[1]}" + (f" of item {self.key[0]}" if self.row[0] or self.key[0] else "")
        return f"{row} {'depends on' if self.kind == 'leak' else 'does not see'} {key}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        key = None if self.key is None else list(self.key)
        return dataclasses.asdict(self) | {"row": list(self.row), "key": key, "nouns": list(self.nouns)}


@dataclasses.dataclass(frozen=True)
class ClaimResult:
    """The result of one claim.

    Attributes:
        name: the claim's name.
        verdict: "held", "broken" or "not answered".
        largest: largest effect where there should be none.
        allowed: the effect that rounding alone can have.
        finding: the counter-example of a broken claim.
        why: why it was not answered, or a remark.
    """

    name: str
    verdict: Verdict
    largest: float = 0.0
    allowed: float = 0.0
    finding: CounterExample | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain values; numbers that are not finite become None."""
        return {
            "name": self.name,
            "verdict": self.verdict,
            "largest": _finite(self.largest),
            "allowed": _finite(self.allowed),
            "finding": None if self.finding is None else self.finding.to_json() | {"size": _finite(self.finding.size)},
            "why": self.why,
        }


def _finite(number: float) -> float | None:
    return number if number - number == 0 else None
