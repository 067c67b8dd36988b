"""Results of an audit: `ClaimResult` is the verdict on a claim, and `CounterExample` shows that a claim is broken."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from saccade.support.language import Message

Verdict = Literal["held", "broken", "not answered"]
Kind = Literal["leak", "blind", "differs"]


@dataclasses.dataclass(frozen=True)
class CounterExample:
    """A counter-example to a claim: an output and a token, or two equivalent runs that differ.

    Attributes:
        kind: "leak" (an output depends on a token that the rule forbids), "blind" (an output does not depend on
            a token that it should see) or "differs" (two equivalent runs differ).
        row: batch item and position of the output.
        key: batch item and position of the token; None if ``kind`` is "differs".
        size: size of the effect: a change relative to the root mean square of all outputs, or a gradient relative to
            the median gradient of allowed pairs; 0 for "blind".
        module: name of the module where the effect first appears; empty if unknown.
        probe: the probe that detected the effect.
        passes: number of forward and backward passes before the effect was detected.
        nouns: what to call the row and the token; "source" and "target" in an encoder-decoder.
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
        """A description of the output and the token of the counter-example."""
        has_items = bool(self.row[0] or (self.key or (0,))[0])
        row = _place(self.nouns[0], self.row, has_items=has_items)
        if self.key is None:
            return row
        words = "{row} depends on {key}" if self.kind == "leak" else "{row} does not see {key}"
        return Message(words, row=row, key=_place(self.nouns[1], self.key, has_items=has_items))

    def to_json(self) -> dict[str, Any]:
        """Return the counter-example as plain values for JSON."""
        key = None if self.key is None else list(self.key)
        return dataclasses.asdict(self) | {"row": list(self.row), "key": key, "nouns": list(self.nouns)}


@dataclasses.dataclass(frozen=True)
class ClaimResult:
    """The audit's verdict on one claim.

    Attributes:
        name: the claim's name.
        verdict: "held", "broken" or "not answered".
        largest: the largest effect measured where there should be none.
        allowed: the largest effect that rounding alone can have.
        finding: the counter-example to a broken claim.
        why: why the claim was not answered, or a remark.
    """

    name: str
    verdict: Verdict
    largest: float = 0.0
    allowed: float = 0.0
    finding: CounterExample | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the verdict on the claim as plain values for JSON; numbers that are not finite become None."""
        return {
            "name": self.name,
            "verdict": self.verdict,
            "largest": _finite(self.largest),
            "allowed": _finite(self.allowed),
            "finding": None if self.finding is None else self.finding.to_json() | {"size": _finite(self.finding.size)},
            "why": self.why,
        }


def _place(noun: str, place: tuple[int, int], *, has_items: bool) -> Message:
    words = "{noun} {position} of item {item}" if has_items else "{noun} {position}"
    return Message(words, noun=Message(noun), position=place[1], item=place[0])


def _finite(number: float) -> float | None:
    return number if number - number == 0 else None
