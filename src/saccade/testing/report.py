"""The `Report` of a conformance check, which prints as a table, and the `Result` of each trial."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Literal

import torch

from saccade.testing.laws import Law, LawBroken

Verdict = Literal["kept", "broken", "not offered", "not applicable"]


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one law on one case in one dtype.

    Attributes:
        law, case: names of the law and the case.
        dtype: the dtype of the inputs.
        verdict: the outcome; "kept" only if the law was tried and holds.
        message: the counter-example, or the reason why the law was not tried; empty if kept.
        roundings: the largest error that the law measured, as the norm of the error divided by the norm of the
            reference, in units of the dtype's eps; None if the law measures no norms.
    """

    law: str
    case: str
    dtype: torch.dtype
    verdict: Verdict
    message: str = ""
    roundings: float | None = None

    def __str__(self) -> str:
        name = f"{self.law}[{self.case}-{str(self.dtype).removeprefix('torch.')}]"
        return f"{name} {self.verdict}{f': {self.message}' if self.message else ''}"

    __repr__ = __str__


@dataclasses.dataclass(frozen=True)
class Report:
    """The report of a conformance check. ``print(report)`` shows the laws with their verdicts and counter-examples.

    Attributes:
        results: one result per law, case and dtype.
        laws: the laws that were tried, in order.
        seed: the seed of the run; ``check(..., seed=report.seed)`` repeats it.
    """

    results: tuple[Result, ...]
    laws: tuple[Law, ...]
    seed: int = 0

    @property
    def kept(self) -> tuple[Result, ...]:
        """Results of trials in which the law holds."""
        return self._with("kept")

    @property
    def broken(self) -> tuple[Result, ...]:
        """Results of trials in which the law does not hold, with counter-examples."""
        return self._with("broken")

    @property
    def not_offered(self) -> tuple[Result, ...]:
        """Results of trials that did not run because the function lacks an option."""
        return self._with("not offered")

    @property
    def ok(self) -> bool:
        """Whether at least one law was tried and no law is broken."""
        return bool(self.kept) and not self.broken

    def raise_if_broken(self) -> Report:
        """Raise `LawBroken` if a law is broken; otherwise return the report.

        The message names the broken laws in its first line. The table and all counter-examples follow.
        """
        if self.broken:
            raise LawBroken("\n".join([self._summary(), "", str(self), "", *(str(result) for result in self.broken)]))
        return self

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("law", "kept", "broken", "not offered", "first counter-example")]
        for law in self.laws:
            results = [result for result in self.results if result.law == law.name]
            counts = Counter(result.verdict for result in results)
            cells = (str(counts[verdict] or ".") for verdict in ("kept", "broken", "not offered"))
            rows.append((law.name, *cells, _first_broken(results)))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:4], widths[1:]), row[4]]) for row in rows]
        reasons = Counter(reason for result in self.not_offered for reason in result.message.split("; "))
        lines += [f"not offered {count} times: {reason}" for reason, count in reasons.most_common()]
        lines.append(f"seed {self.seed}: seed={self.seed} repeats this run")
        lines.append(self._summary())
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__

    def _with(self, verdict: Verdict) -> tuple[Result, ...]:
        return tuple(result for result in self.results if result.verdict == verdict)

    def _summary(self) -> str:
        broken = list(dict.fromkeys(result.law for result in self.broken))
        tried = {result.law for result in (*self.kept, *self.broken)}
        if not tried:
            return "No law could be tried."
        if not broken:
            return f"All {len(tried)} laws that could be tried hold."
        return f"{len(broken)} of the {len(tried)} laws that could be tried are broken: {', '.join(broken)}."


def _first_broken(results: list[Result]) -> str:
    for result in results:
        if result.verdict == "broken":
            return f"{result.case}-{str(result.dtype).removeprefix('torch.')}: {result.message}"
    return "" if any(result.verdict != "not applicable" for result in results) else "(no case applies)"
