"""Five tutorial documents about attention: their statements, each with the claim and measurement that test it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from saccade.theory.claim import Verdict
from saccade.theory.claims import find

_CHINESE: dict[Verdict, str] = {"holds": "成立", "holds if": "有条件成立", "refuted": "被推翻"}


class Said(NamedTuple):
    """A statement about attention from a tutorial document, and the claim that tests the statement.

    Attributes:
        statement: the statement, paraphrased.
        chinese: the statement in Chinese.
        claim: the name of the claim that tests the statement.
        row: the name of the claim's measurement that could contradict the verdict.
        verdict: the verdict on this statement, by default the claim's verdict.
    """

    statement: str
    chinese: str
    claim: str
    row: str
    verdict: Verdict


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
            tuple(Said(**{"verdict": find(said["claim"]).verdict} | said) for said in one["says"]),
        )
        for one in documents
    )


DOCUMENTS = _read()
"""The five tutorial documents that ``documents.toml`` describes."""


def listed(documents: Sequence[Document] | None = None) -> str:
    """List the statements of tutorial documents (all if None) with verdict, claim and measurement, as plain text."""
    lines: list[str] = []
    for document in DOCUMENTS if documents is None else documents:
        lines.append(document.title.upper())
        for said in document.says:
            lines += [f"  {said.verdict:<8}  {said.statement}", f"            {said.claim}: {said.row}"]
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
            lines.append("| " + " | ".join([*words, f"`{said.claim}`", said.row.replace("|", "\\|")]) + " |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)
