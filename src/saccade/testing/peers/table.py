"""Which laws the peers keep, found by trying, as parts of a document."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from saccade.testing.case import Case
from saccade.testing.conformance import trials, try_law
from saccade.testing.laws import LAWS, Law
from saccade.testing.peers.libraries import PEERS
from saccade.testing.peers.peer import Library, Peer
from saccade.testing.report import Result, Verdict

__all__ = ["COMMAND", "Finding", "command", "find", "written"]

COMMAND = "python -m saccade.testing.peers"
_MARKS: dict[Verdict, str] = {"kept": "✓", "broken": "✗", "not offered": "–", "not applicable": " "}


@dataclasses.dataclass(frozen=True)
class Finding:
    """What became of one law with one peer.

    Attributes:
        law: its name.
        peer: its number, from 1.
        verdict: "broken" if on any case; else "kept" if on any; else what it was on all.
        message: the first counter-example, with the name of its case; empty if there is none.
    """

    law: str
    peer: int
    verdict: Verdict
    message: str = ""


def command(library: Library) -> str:
    """What makes the table of a library."""
    return f"{COMMAND} --only {library.name}"


def find(
    peers: Sequence[Peer] | None = None,
    laws: Sequence[Law] | None = None,
    cases: Sequence[Case] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Finding, ...]:
    """Try every law on every peer, on the law's own cases and dtype unless others are passed.

    None stands for all `PEERS` and all `LAWS`.
    """
    laws, peers = LAWS if laws is None else laws, PEERS if peers is None else peers
    return tuple(_finding(law, peer, cases, dtype) for law in laws for peer in peers)


def written(library: Library, findings: Sequence[Finding]) -> str:
    """The findings in Markdown: a table of laws and peers, and a counter-example for each broken law.

    Laws that say nothing about any of the peers, and those that need what none of them offers, share a line.
    """
    laws = list(dict.fromkeys(finding.law for finding in findings))
    numbers = list(dict.fromkeys(finding.peer for finding in findings))
    marks = {(finding.law, finding.peer): _MARKS[finding.verdict] for finding in findings}
    rows = {law: tuple(marks[law, number] for number in numbers) for law in laws}
    told = [([law], row) for law, row in rows.items() if {"✓", "✗"}.intersection(row)]
    silent = dict.fromkeys(row for row in rows.values() if not {"✓", "✗"}.intersection(row))
    told += [([law for law in laws if rows[law] == row], row) for row in silent]
    lines = [f"| {library.package} {library.version} | {' | '.join(map(str, numbers))} |"]
    lines.append(f"|---|{'---|' * len(numbers)}")
    lines += [f"| {' '.join(f'`{law}`' for law in names)} | {' | '.join(row)} |" for names, row in told]
    examples: dict[str, dict[str, list[int]]] = {}
    for finding in findings:
        if finding.verdict == "broken":
            examples.setdefault(finding.law, {}).setdefault(finding.message, []).append(finding.peer)
    if not examples:
        return "\n".join(lines)
    lines += ["", "```text"]
    for law, messages in examples.items():
        lines += [law, *(f"  {', '.join(map(str, by))}: {message}" for message, by in messages.items())]
    return "\n".join([*lines, "```"])


def _finding(law: Law, peer: Peer, cases: Sequence[Case] | None, dtype: torch.dtype | None) -> Finding:
    number = PEERS.index(peer) + 1
    results = list(_tried(law, peer, peer.cases() if cases is None else cases, dtype or peer.dtype))
    verdicts: tuple[Verdict, ...] = ("broken", "kept", "not offered", "not applicable")
    for verdict in verdicts:
        for result in results:
            if result.verdict == verdict:
                shown = f"{result.case}-{str(result.dtype).removeprefix('torch.')}: {result.message}"
                return Finding(law.name, number, verdict, shown if verdict == "broken" else "")
    return Finding(law.name, number, "not applicable")


def _tried(law: Law, peer: Peer, cases: Sequence[Case], dtype: torch.dtype) -> Iterator[Result]:
    subject = peer.subject()
    for _, case, of in trials([law], cases, [dtype]):
        asked = peer.asked(law, case)
        if asked is not None:
            yield try_law(subject, law, asked, of)
