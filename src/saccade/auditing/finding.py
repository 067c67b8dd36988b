"""Finding: one pair of tokens, or two runs, that contradict what was declared; and the claim that it breaks."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Verdict = Literal["held", "broken", "not answered"]
Kind = Literal["leak", "blind", "differs"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One counter-example.

    Attributes:
        kind: "leak" (an output depends on a token that the rule hides from it), "blind" (it does not depend on one that
            it should), "differs" (two ways of running say different things).
        row: batch item and place of the output.
        key: batch item and place of the token; None where runs differ.
        size: how large the effect is: a change by the root mean square of all outputs, a gradient by the median of
            those that are allowed; 0 for "blind".
        module: the module where it first appears, by its name in the model; empty if that is not known.
        probe: how it was found.
        passes: forward and backward passes until then.
        nouns: what the row and the token are called; "source" and "target" in an encoder-decoder.
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
        """Plain values."""
        key = None if self.key is None else list(self.key)
        return dataclasses.asdict(self) | {"row": list(self.row), "key": key, "nouns": list(self.nouns)}


@dataclasses.dataclass(frozen=True)
class Judged:
    """What came of one claim.

    Attributes:
        name: of the claim.
        verdict: "held", "broken" or "not answered".
        largest: largest effect where there should be none.
        allowed: how large rounding alone can make it.
        finding: the counter-example of a broken claim.
        why: why it was not answered, or what else is to be said.
    """

    name: str
    verdict: Verdict
    largest: float = 0.0
    allowed: float = 0.0
    finding: Finding | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values; numbers that are not finite become None."""
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
