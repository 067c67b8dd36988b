"""Claims as Markdown, for the documents: a table of verdicts, and a section for each claim."""

from __future__ import annotations

from collections.abc import Sequence

from saccade.theory.claim import Claim, Verdict

__all__ = ["CONDITION", "sections", "table"]

CONDITION: dict[Verdict, str] = {"holds": "With", "holds if": "If", "refuted": "But"}
"""The word that leads from a verdict to its conditions."""


def table(claims: Sequence[Claim]) -> str:
    """One row for each claim: name, verdict, statement."""
    lines = ["| claim | verdict | what is said |", "|---|---|---|"]
    lines += [f"| `{claim.name}` | {claim.verdict} | {claim.statement} |" for claim in claims]
    return "\n".join(lines) + "\n"


def sections(claims: Sequence[Claim]) -> str:
    """One section for each claim: statement, formula, conditions, source."""
    return "\n".join(_section(claim) for claim in claims)


def _section(claim: Claim) -> str:
    lines = [f"### `{claim.name}`: {claim.verdict}", "", claim.statement, "", "$$", claim.latex, "$$", ""]
    if claim.conditions:
        lines += [f"*{CONDITION[claim.verdict]}:* {claim.conditions}.", ""]
    return "\n".join([*lines, f"*Source:* {claim.source}.", ""])
