"""Five tutorial documents about attention: their statements, each with the claim and the measurement that test it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from saccade.theory.claim import Verdict
from saccade.theory.claims import find

Judged = Verdict | Literal["not checked"]
"""The verdict on a statement, or "not checked" if no measurement of this library could contradict it."""

_CHINESE: dict[Judged, str] = {
    "holds": "成立",
    "holds if": "有条件成立",
    "refuted": "被推翻",
    "not checked": "未检验",
}


class Said(NamedTuple):
    """A statement about attention from a tutorial document, and the claim that tests the statement.

    Attributes:
        statement: the statement, paraphrased.
        chinese: the statement in Chinese.
        claim: the name of the claim that tests the statement; empty if none does.
        row: the name of the claim's measurement that could contradict the verdict.
        verdict: the verdict on this statement, by default the claim's verdict; "not checked" without a claim.
        condition: for a statement that holds if, the condition; empty if it is that of the claim.
        condition_in_chinese: the condition in Chinese.
        reason: for a statement that is not checked, the reason.
        reason_in_chinese: the reason in Chinese.
    """

    statement: str
    chinese: str
    claim: str = ""
    row: str = ""
    verdict: Judged = "not checked"
    condition: str = ""
    condition_in_chinese: str = ""
    reason: str = ""
    reason_in_chinese: str = ""


class Document(NamedTuple):
    """A tutorial document and its statements, in the tutorial's order.

    Attributes:
        title: the title in English.
        chinese: the title in Chinese.
        says: the statements.
    """

    title: str
    chinese: str
    says: tuple[Said, ...]


def _read() -> tuple[Document, ...]:
    with (Path(__file__).parent / "documents.toml").open("rb") as file:
        documents = tomllib.load(file)["document"]
    return tuple(
        Document(
            one["title"],
            one["chinese"],
            tuple(_statement(said) for said in one["says"]),
        )
        for one in documents
    )


def _statement(said: dict[str, str]) -> Said:
    return Said(**({"verdict": find(said["claim"]).verdict} if "claim" in said else {}) | said)  # type: ignore[arg-type]


DOCUMENTS = _read()
"""The five tutorial documents that ``documents.toml`` describes."""


def listed(documents: Sequence[Document] | None = None) -> str:
    """List the statements of tutorial documents (all if None), as plain text.

    Each has its verdict, the condition if it holds under one, the claim and the measurement.
    """
    lines: list[str] = []
    for document in DOCUMENTS if documents is None else documents:
        lines.append(document.title.upper())
        for said in document.says:
            told = f"{said.claim}: {said.row}" if said.claim else said.reason
            lines.append(f"  {said.verdict:<11}  {said.statement}")
            if said.verdict == "holds if":
                lines.append(f"               if {said.condition or find(said.claim).conditions}.")
            lines.append(f"               {told}")
    return "\n".join(lines) + "\n"


def tables(documents: Sequence[Document] | None = None, *, chinese: bool = False) -> str:
    """Format the statements of tutorial documents (all if None) as Markdown: one table per document."""
    head = (
        "| 论述 | 结论 | 论断 | 可推翻结论的测量 |"
        if chinese
        else "| statement | verdict | claim | measurement that could contradict it |"
    )
    parts = []
    for document in DOCUMENTS if documents is None else documents:
        lines = [f"## {document.chinese if chinese else document.title}", "", head, "|---|---|---|---|"]
        for said in document.says:
            words = (said.chinese, _CHINESE[said.verdict]) if chinese else (said.statement, said.verdict)
            if said.condition:
                words = (words[0], f"{words[1]}{f'：{said.condition_in_chinese}' if chinese else f' {said.condition}'}")
            told = (
                (f"`{said.claim}`", said.row)
                if said.claim
                else ("", said.reason_in_chinese if chinese else said.reason)
            )
            lines.append("| " + " | ".join([*words, told[0], told[1].replace("|", "\\|")]) + " |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)
