"""Which laws the peers keep, found by trying, as a part of a document."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from saccade.testing.case import Case
from saccade.testing.cases import CASES
from saccade.testing.conformance import trials, try_law
from saccade.testing.laws import LAWS, Law
from saccade.testing.patterns import PATTERNS
from saccade.testing.peers.torch_attention import PEERS, Peer
from saccade.testing.report import Result, Verdict

__all__ = ["COMMAND", "Finding", "find", "written"]

COMMAND = "python -m saccade.testing.peers"
"""What makes the table of a page."""
# Patterns are masks like others to a function that takes tensors.
_CASES = tuple(case for case in CASES if case not in PATTERNS)
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


def find(
    peers: Sequence[Peer] = PEERS,
    laws: Sequence[Law] = LAWS,
    cases: Sequence[Case] = _CASES,
    dtype: torch.dtype = torch.float64,
) -> tuple[Finding, ...]:
    """Try every law on every peer."""
    return tuple(
        _finding(law, number, [try_law(peer.subject(), *trial) for trial in trials([law], cases, [dtype])])
        for law in laws
        for number, peer in enumerate(peers, start=1)
    )


def written(findings: Sequence[Finding]) -> str:
    """The findings in Markdown: a table of laws and peers, and a counter-example for each broken law."""
    laws = list(dict.fromkeys(finding.law for finding in findings))
    numbers = list(dict.fromkeys(finding.peer for finding in findings))
    marks = {(finding.law, finding.peer): _MARKS[finding.verdict] for finding in findings}
    version = torch.__version__.partition("+")[0]
    lines = [f"| torch {version} | {' | '.join(map(str, numbers))} |", f"|---|{'---|' * len(numbers)}"]
    lines += [f"| `{law}` | {' | '.join(marks[law, number] for number in numbers)} |" for law in laws]
    examples: dict[str, dict[str, list[int]]] = {}
    for finding in findings:
        if finding.verdict == "broken":
            examples.setdefault(finding.law, {}).setdefault(finding.message, []).append(finding.peer)
    lines += ["", "```text"]
    for law, messages in examples.items():
        lines += [law, *(f"  {', '.join(map(str, by))}: {message}" for message, by in messages.items())]
    return "\n".join([*lines, "```"])


def _finding(law: Law, number: int, results: Sequence[Result]) -> Finding:
    verdicts: tuple[Verdict, ...] = ("broken", "kept", "not offered", "not applicable")
    for verdict in verdicts:
        for result in results:
            if result.verdict == verdict:
                shown = f"{result.case}-{str(result.dtype).removeprefix('torch.')}: {result.message}"
                return Finding(law.name, number, verdict, shown if verdict == "broken" else "")
    return Finding(law.name, number, "not applicable")
