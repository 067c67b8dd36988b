"""What `saccade.compare` says of mechanisms: numbers, a verdict, and a table of them."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

__all__ = ["CLOSE", "ROUGH", "Compared", "Comparison"]

CLOSE, ROUGH = 0.01, 0.1
"""Median relative errors up to which a result counts as close to exact attention, and as of any use."""


class Compared(NamedTuple):
    """How one mechanism did.

    Attributes:
        name: of the mechanism.
        error_median, error_worst: of the rows of the output, ``|out - exact| / |exact|``; rows in which exact
            attention is 0 are left out.
        distance_median, distance_worst: half the sum of absolute differences between rows of the two matrices (total
            variation where both are distributions: 0 is equal, 1 is nothing in common), over some rows.
        seconds: of one product at the given length, the median of a few.
        memory_bytes: most that one product held at a time beside its inputs, its output included.
        faster_from: from how many keys on it is faster than exact attention, interpolated between the lengths timed,
            the shortest of them if it is faster at all; None if it is not at the longest.
        timed_to: the longest length timed, in keys.
        reasons: why it cannot run these inputs; then the numbers are NaN.
    """

    name: str
    error_median: float = math.nan
    error_worst: float = math.nan
    distance_median: float = math.nan
    distance_worst: float = math.nan
    seconds: float = math.nan
    memory_bytes: float = math.nan
    faster_from: int | None = None
    timed_to: int = 0
    reasons: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The median error in words: "close" up to 1 %, "rough" up to 10 %, else "too far off to be of use"."""
        if self.reasons:
            return "refused: " + "; ".join(self.reasons)
        if math.isnan(self.error_median):
            return "nothing to compare: exact attention is 0 everywhere, or something is not finite"
        if self.error_median <= CLOSE:
            return "close to exact attention"
        if self.error_median <= ROUGH:
            return "rough: another model than with exact attention, unless it is trained with this"
        return "too far off to be of use in the place of exact attention on these tensors"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Mechanisms beside exact softmax attention, on the tensors of one call; prints as a table.

    Attributes:
        rows: one for each mechanism, in the order given.
        shape: (batch, heads, q_len, kv_len).
        exact_seconds, exact_memory_bytes: of exact attention, at the given length.
        lengths: in keys, at which products were timed.
        is_measured: True if memory was measured, by the device; False if it was counted: the tensors that torch's
            operations return, without what these need inside.
    """

    rows: tuple[Compared, ...]
    shape: tuple[int, int, int, int]
    exact_seconds: float
    exact_memory_bytes: float
    lengths: tuple[int, ...]
    is_measured: bool

    def __str__(self) -> str:
        batch, heads, q_len, kv_len = self.shape
        memory = "measured" if self.is_measured else "counted"
        head = ["", "error", "worst", "distance", "worst", "time", f"memory ({memory})", "faster from"]
        lines = [head, ["exact", *["-"] * 4, _duration(self.exact_seconds), _size(self.exact_memory_bytes), "-"]]
        for row in self.rows:
            numbers = (row.error_median, row.error_worst, row.distance_median, row.distance_worst)
            shares = ["-" if math.isnan(x) else f"{x:.3f}" if x < 10 else f"{x:.3g}" for x in numbers]
            lines.append([row.name, *shares, _duration(row.seconds), _size(row.memory_bytes), self._since(row)])
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        table = [
            "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(pairs))
            for pairs in (list(zip(line, widths, strict=True)) for line in lines)
        ]
        first = f"batch {batch}, {heads} heads, {q_len} queries, {kv_len} keys; errors relative to exact attention"
        verdicts = [f"{row.name}: {row.verdict}" for row in self.rows]
        return "\n".join([first, *(line.rstrip() for line in table), *verdicts])

    def _since(self, row: Compared) -> str:
        if row.reasons:
            return "-"
        if row.faster_from is None:
            return f"never up to {row.timed_to}"
        return f"{'<= ' if row.faster_from == self.lengths[0] else ''}{row.faster_from}"


def _duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _size(size: float) -> str:
    if math.isnan(size):
        return "-"
    return f"{size / 2**20:.3g} MiB" if size >= 2**20 else f"{size / 2**10:.3g} KiB"
