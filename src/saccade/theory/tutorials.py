"""Five tutorials about attention: their statements, each with the claim and the measurement that test it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from saccade.support.language import Message, in_language, translated
from saccade.theory.claim import Verdict
from saccade.theory.claims import find

_DIFFERENCE = ", largest difference"
Judged = Verdict | Literal["not checked"]
"""The verdict on a statement, or "not checked" if no measurement of this library could contradict it."""

_CHINESE: dict[Judged, str] = {
    "holds": "成立",
    "holds if": "有条件成立",
    "refuted": "被推翻",
    "not checked": "未检验",
}


class Statement(NamedTuple):
    """A statement about attention from a tutorial, and the claim that tests the statement.

    Attributes:
        statement: the statement, paraphrased.
        chinese: the statement in Chinese.
        claim: the name of the claim that tests the statement; empty if none does.
        row: the name of the claim's measurement that could contradict the verdict.
        row_in_chinese: the name in Chinese, if it contains a number or another value; otherwise empty.
        verdict: the verdict on this statement, by default the claim's verdict; "not checked" without a claim.
        condition: the condition of a "holds if" statement; empty if it is the claim's condition.
        condition_in_chinese: the condition in Chinese.
        reason: the reason why a statement is not checked.
        reason_in_chinese: the reason in Chinese.
    """

    statement: str
    chinese: str
    claim: str = ""
    row: str = ""
    row_in_chinese: str = ""
    verdict: Judged = "not checked"
    condition: str = ""
    condition_in_chinese: str = ""
    reason: str = ""
    reason_in_chinese: str = ""


class Tutorial(NamedTuple):
    """A tutorial and its statements, in the tutorial's order.

    Attributes:
        title: the title in English.
        chinese: the title in Chinese.
        says: the statements.
    """

    title: str
    chinese: str
    says: tuple[Statement, ...]


def _read_tutorials() -> tuple[Tutorial, ...]:
    """Read the tutorials and their statements from ``tutorials.toml``."""
    with (Path(__file__).parent / "tutorials.toml").open("rb") as file:
        documents = tomllib.load(file)["document"]
    return tuple(
        Tutorial(
            document["title"],
            document["chinese"],
            tuple(_statement(entry) for entry in document["says"]),
        )
        for document in documents
    )


def _statement(fields: dict[str, str]) -> Statement:
    return Statement(**({"verdict": find(fields["claim"]).verdict} if "claim" in fields else {}) | fields)  # type: ignore[arg-type]


TUTORIALS = _read_tutorials()
"""The five tutorials that ``tutorials.toml`` describes."""


def listed(tutorials: Sequence[Tutorial] | None = None) -> str:
    """List the statements of tutorials as plain text; None lists those of all tutorials.

    Each is listed with its verdict, its condition if the verdict is "holds if", its claim and its measurement.
    """
    lines: list[str] = []
    for tutorial in TUTORIALS if tutorials is None else tutorials:
        lines.append(tutorial.title.upper())
        for entry in tutorial.says:
            evidence = f"{entry.claim}: {entry.row}" if entry.claim else entry.reason
            lines.append(f"  {entry.verdict:<11}  {entry.statement}")
            if entry.verdict == "holds if":
                lines.append(f"               if {entry.condition or find(entry.claim).conditions}.")
            lines.append(f"               {evidence}")
    return "\n".join(lines) + "\n"


def tables(tutorials: Sequence[Tutorial] | None = None, *, chinese: bool = False) -> str:
    """Format the statements of tutorials as Markdown, with one table per tutorial; None formats all tutorials."""
    head = (
        "| 论述 | 结论 | 论断 | 可推翻结论的测量 |"
        if chinese
        else "| statement | verdict | claim | measurement that could contradict it |"
    )
    parts = []
    for tutorial in TUTORIALS if tutorials is None else tutorials:
        lines = [f"## {tutorial.chinese if chinese else tutorial.title}", "", head, "|---|---|---|---|"]
        for entry in tutorial.says:
            words = (entry.chinese, _CHINESE[entry.verdict]) if chinese else (entry.statement, entry.verdict)
            if entry.condition:
                condition = f"：{entry.condition_in_chinese}" if chinese else f" {entry.condition}"
                words = (words[0], words[1] + condition)
            evidence = (
                (f"`{entry.claim}`", row_in_chinese(entry) if chinese else entry.row)
                if entry.claim
                else ("", entry.reason_in_chinese if chinese else entry.reason)
            )
            lines.append("| " + " | ".join([*words, evidence[0], evidence[1].replace("|", "\\|")]) + " |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def row_in_chinese(entry: Statement) -> str:
    """Return a tutorial statement's measurement, named in Chinese."""
    if entry.row_in_chinese:
        return entry.row_in_chinese
    name = Message(entry.row.removesuffix(_DIFFERENCE))
    with in_language("zh"):
        return translated(Message("{what}" + _DIFFERENCE, what=name) if name != entry.row else name)
