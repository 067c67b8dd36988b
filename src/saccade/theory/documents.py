"""Statements of tutorials about attention, each with the measurement that could contradict its verdict."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from saccade.theory.claim import Verdict
from saccade.theory.claims import find

_CHINESE: dict[Verdict, str] = {"holds": "成立", "holds if": "有条件成立", "refuted": "被推翻"}


class Said(NamedTuple):
    """A statement of a tutorial, and the claim that judges it.

    Attributes:
        statement: in our words.
        chinese: the same in Chinese.
        claim: the name of the claim that judges it.
        row: the measurement of that claim that could contradict the verdict.
        verdict: on this statement; by default that of the claim.
    """

    statement: str
    chinese: str
    claim: str
    row: str
    verdict: Verdict


class Document(NamedTuple):
    """A tutorial and its statements, in its order.

    Attributes:
        title: in English.
        chinese: the title in Chinese.
        says: its statements.
    """

    title: str
    chinese: str
    says: tuple[Said, ...]


def _read() -> tuple[Document, ...]:
    with (Path(__file__).parent / "documents.toml").open("rb") as file:
        told = tomllib.load(file)["document"]
    return tuple(
        Document(
            one["title"],
            one["chinese"],
            tuple(Said(**{"verdict": find(said["claim"]).verdict} | said) for said in one["says"]),
        )
        for one in told
    )


DOCUMENTS = _read()
"""Five tutorials, as ``documents.toml`` tells them."""


def listed(documents: Sequence[Document] | None = None) -> str:
    """Return every statement of the documents (of all if None) with its verdict, claim and test, as plain text."""
    lines: list[str] = []
    for document in DOCUMENTS if documents is None else documents:
        lines.append(document.title.upper())
        for said in document.says:
            lines += [f"  {said.verdict:<8}  {said.statement}", f"            {said.claim}: {said.row}"]
    return "\n".join(lines) + "\n"


def tables(documents: Sequence[Document] | None = None, *, chinese: bool = False) -> str:
    """Like `listed`, as Markdown: one table per document."""
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
