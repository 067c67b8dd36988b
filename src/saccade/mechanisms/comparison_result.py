"""The result of compare(), which prints as a table with a row for each mechanism and mask."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from saccade.mechanisms.compared_caches import ComparedCache
from saccade.support.columns import display_width, left_aligned, right_aligned
from saccade.support.language import Message, joined, translated

CLOSE, ROUGH = 0.01, 0.1
"""Largest median relative errors that are called "close" to exact attention, and "rough"."""


class Compared(NamedTuple):
    """The result of comparing one mechanism or mask with exact attention.

    Attributes:
        name: name of the mechanism or mask.
        error_median, error_worst: median and largest relative error of the output's rows, ``|out - exact| / |exact|``.
            Rows in which exact attention is 0 are left out.
        distance_median, distance_worst: median and largest distance between rows of the two matrices, over a sample of
            the rows. The distance is half the sum of absolute differences. For distributions, this is the total
            variation distance: 0 if they are equal, 1 if they have no key in common.
        seconds: median time of one product at the actual length.
        memory_bytes: peak memory that one product allocated, in bytes, including its output.
        faster_from: number of keys from which the mechanism is faster than exact attention, interpolated between the
            timed lengths. The shortest if it is faster at all of them; None if it is slower at the longest.
        timed_to: the longest timed length, in keys.
        reasons: why the mechanism cannot run on these inputs; if there are any, all measurements are NaN.
        quality: the result of the ``quality`` function passed to `saccade.compare`; NaN if none was passed.
        hides_nothing: whether the row stands for a mask that masks no pairs of these inputs, so that its error says
            nothing about longer inputs.
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
    quality: float = math.nan
    hides_nothing: bool = False

    @property
    def verdict(self) -> str:
        """The median error in words: "close" up to 1 %, "rough" up to 10 %, and "too far off" above that."""
        if self.reasons:
            return Message("refused: {reasons}", reasons=joined(self.reasons))
        if self.hides_nothing:
            return Message("hides no pair at this length, so it equals exact attention; compare longer inputs")
        if math.isnan(self.error_median):
            return Message("nothing to compare: exact attention is 0 everywhere, or something is not finite")
        if self.error_median <= CLOSE:
            return Message("close to exact attention")
        if self.error_median <= ROUGH:
            return Message("rough: expect different model outputs, unless the model is trained with it")
        return Message("too far off to replace exact attention on these tensors")


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """A comparison of mechanisms and masks with exact softmax attention on the tensors of one call; prints as a table.

    Attributes:
        rows: one for each mechanism and mask, in the order of the arguments.
        shape: (batch, heads, q_len, kv_len).
        exact_seconds, exact_memory_bytes: time and memory of exact attention at the actual length.
        lengths: numbers of keys at which products were timed.
        is_measured: True if the memory was measured on the device. False if it was estimated from the tensors that
            torch's operations return, without the memory that the operations use internally.
        sdpa: the row for torch's ``F.scaled_dot_product_attention`` with the same mask. Torch needs the mask as a
            tensor unless it is full or causal. The memory of this tensor is counted, but not the time to create it.
        exact_quality: the result of the ``quality`` function for exact attention; NaN if none was passed.
        caches: one row for each cache that was passed; see `ComparedCache`.
    """

    rows: tuple[Compared, ...]
    shape: tuple[int, int, int, int]
    exact_seconds: float
    exact_memory_bytes: float
    lengths: tuple[int, ...]
    is_measured: bool
    sdpa: Compared | None = None
    exact_quality: float = math.nan
    caches: tuple[ComparedCache, ...] = ()

    def __str__(self) -> str:
        memory = "memory (measured)" if self.is_measured else "memory (counted)"
        names = ("error", "worst error", "distance", "worst distance", "time", memory, "faster from (keys)", "quality")
        exact = [translated("exact"), *["-"] * 4, _duration(self.exact_seconds), _size(self.exact_memory_bytes), "-"]
        lines = [["", *map(translated, names)], [*exact, _format_number(self.exact_quality)]]
        for row in (*([] if self.sdpa is None else [self.sdpa]), *self.rows):
            numbers = (row.error_median, row.error_worst, row.distance_median, row.distance_worst)
            costs = [_duration(row.seconds), _size(row.memory_bytes), self._faster_from(row)]
            lines.append([row.name, *map(_format_number, numbers), *costs, _format_number(row.quality)])
        if not self._has_quality:
            lines = [line[:-1] for line in lines]
        table = _table(lines)
        sizes = dict(zip(("batch", "heads", "q_len", "kv_len"), self.shape, strict=True))
        first = "batch {batch}, {heads} heads, {q_len} queries, {kv_len} keys; errors relative to exact attention"
        verdicts = [*([] if self.sdpa is None or not self.sdpa.reasons else [self.sdpa]), *self.rows]
        return "\n".join([translated(first, **sizes), *table, *map(_verdict, verdicts), *self._of_caches])

    __repr__ = __str__

    @property
    def _of_caches(self) -> list[str]:
        """The lines of the printed table of caches: their errors and sizes, and why some were refused."""
        if not self.caches:
            return []
        lines = [list(map(translated, ("", "error", "worst error", "size", "of KVCache")))]
        for row in self.caches:
            share = "-" if row.reasons else f"{row.share:.0%}"
            lines.append(
                [
                    row.name,
                    _format_number(row.error_median),
                    _format_number(row.error_worst),
                    _size(row.stored_bytes),
                    share,
                ]
            )
        refused = [row for row in self.caches if row.reasons]
        reasons = [Message("{name}: refused: {reasons}", name=row.name, reasons=joined(row.reasons)) for row in refused]
        return ["", *_table(lines), *map(translated, reasons)]

    @property
    def _has_quality(self) -> bool:
        return not all(math.isnan(x) for x in (self.exact_quality, *(row.quality for row in self.rows)))

    def _faster_from(self, row: Compared) -> str:
        if row.reasons:
            return "-"
        if row.faster_from is None:
            return translated("never up to {longest}", longest=row.timed_to)
        if row.faster_from == self.lengths[0]:
            return translated("at most {length}", length=row.faster_from)
        return str(row.faster_from)


def _table(lines: list[list[str]]) -> list[str]:
    """Return the lines of a table with a left-aligned first column."""
    widths = [max(display_width(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [
        "  ".join((right_aligned if i else left_aligned)(cell, width) for i, (cell, width) in enumerate(pairs)).rstrip()
        for pairs in (list(zip(line, widths, strict=True)) for line in lines)
    ]


def _verdict(row: Compared) -> str:
    return translated("{name}: {verdict}", name=row.name, verdict=translated(row.verdict))


def _format_number(x: float) -> str:
    """Format an error or a quality of a mechanism for the table; NaN becomes a dash."""
    return "-" if math.isnan(x) else f"{x:.3f}" if x < 10 else f"{x:.3g}"


def _duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _size(size: float) -> str:
    if math.isnan(size):
        return "-"
    return f"{size / 2**20:.3g} MiB" if size >= 2**20 else f"{size / 2**10:.3g} KiB"
