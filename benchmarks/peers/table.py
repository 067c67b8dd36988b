"""The libraries under test, and tables of the laws that each of their functions keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from benchmarks.peers.bigbird import BIGBIRD
from benchmarks.peers.fla import FLA
from benchmarks.peers.flex import FLEX
from benchmarks.peers.local_attention import LOCAL_ATTENTION
from benchmarks.peers.longformer import LONGFORMER
from benchmarks.peers.peer import Library, Peer
from benchmarks.peers.performer import PERFORMER
from benchmarks.peers.torch_attention import TORCH
from benchmarks.peers.x_transformers import X_TRANSFORMERS
from saccade.testing.case import Case
from saccade.testing.conformance import trials, try_law
from saccade.testing.laws import LAWS, Law
from saccade.testing.report import Result, Verdict

__all__ = ["COMMAND", "LIBRARIES", "PEERS", "Finding", "command", "find", "written"]

LIBRARIES = (TORCH, FLEX, X_TRANSFORMERS, LOCAL_ATTENTION, LONGFORMER, BIGBIRD, PERFORMER, FLA)
"""The libraries in the order of the document."""
PEERS = tuple(peer for library in LIBRARIES for peer in library.peers)

COMMAND = "python -m benchmarks.peers"
_MARKS: dict[Verdict, str] = {"kept": "✓", "broken": "✗", "not offered": "–", "not applicable": " "}


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one law on one peer.

    Attributes:
        law: its name.
        peer: its number, from 1.
        verdict: "broken" if broken on any case; else "kept" if kept on any; else the verdict of all cases.
        message: the first counter-example, with the name of its case, or an empty string.
    """

    law: str
    peer: int
    verdict: Verdict
    message: str = ""


def command(library: Library) -> str:
    """Return the command that writes the table of a library."""
    return f"{COMMAND} --only {library.name}"


def find(
    peers: Sequence[Peer] | None = None,
    laws: Sequence[Law] | None = None,
    cases: Sequence[Case] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Finding, ...]:
    """Try every law on every peer, on the law's own cases and dtype unless others are passed.

    None means all `PEERS` and all `LAWS`.
    """
    laws, peers = LAWS if laws is None else laws, PEERS if peers is None else peers
    return tuple(_finding(law, peer, cases, dtype) for law in laws for peer in peers)


def written(library: Library, findings: Sequence[Finding]) -> str:
    """Write the findings in Markdown: a table of laws and peers, and a counter-example for each broken law.

    Laws that apply to none of the peers share a line, and so do those that need an option that none offers.
    """
    laws = list(dict.fromkeys(finding.law for finding in findings))
    numbers = list(dict.fromkeys(finding.peer for finding in findings))
    marks = {(finding.law, finding.peer): _MARKS[finding.verdict] for finding in findings}
    rows = {law: tuple(marks[law, number] for number in numbers) for law in laws}
    shown_rows = [([law], row) for law, row in rows.items() if {"✓", "✗"}.intersection(row)]
    silent = dict.fromkeys(row for row in rows.values() if not {"✓", "✗"}.intersection(row))
    shown_rows += [([law for law in laws if rows[law] == row], row) for row in silent]
    lines = [f"| {library.package} {library.version} | {' | '.join(map(str, numbers))} |"]
    lines.append(f"|---|{'---|' * len(numbers)}")
    lines += [f"| {' '.join(f'`{law}`' for law in names)} | {' | '.join(row)} |" for names, row in shown_rows]
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
        tried = peer.case_for(law, case)
        if tried is not None:
            yield try_law(subject, law, tried, of)
