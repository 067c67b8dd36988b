"""compare(): how wrong, how fast, and from which length on."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.arguments import is_integer
from saccade.engine.checks import check_value
from saccade.engine.memory import counted
from saccade.errors import describe, type_error, value_error
from saccade.masks import After, And, Dense, Documents, Mask, Not, Or, Padding, Predicate, as_mask
from saccade.matrix import Matrix
from saccade.mechanisms import Mechanism, Softmax

__all__ = ["Compared", "Comparison", "compare"]

CLOSE, ROUGH = 0.01, 0.1
"""Median relative errors up to which a result counts as close to exact attention, and as of any use."""

_SAMPLED = 64  # rows whose distributions are compared
_ROUNDS = 3
_PATIENCE = 1.0  # seconds of one exact product, from which on no longer one is timed


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
        """In words, by the median error: "close" up to 1 %, "rough" up to 10 %, else "too far off to be of use"."""
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


def compare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mechanisms: Sequence[Mechanism],
    *,
    mask: object = None,
    timed_lengths: Sequence[int] | None = None,
) -> Comparison:
    """Say how far mechanisms are from exact softmax attention on given tensors, what they cost, and when they pay.

    Errors and memory are those of the tensors as they are. Products are also timed at other lengths, on the first
    tokens or on tokens repeated, to find where a mechanism becomes faster than exact attention on this machine.

    Args:
        query: ``[batch, heads, q_len, head_dim]``.
        key: ``[batch, kv_heads, kv_len, head_dim]``.
        value: ``[batch, kv_heads, kv_len, value_dim]``.
        mechanisms: what is compared; one that cannot have the mask gets a row that says why.
        mask: who may attend to whom, anything that `saccade.attention` takes.
        timed_lengths: numbers of keys at which to time; ``kv_len`` / 8 to 4 ``kv_len`` when None. Facts of the batch
            (Padding, Documents, a tensor) say nothing of longer inputs, and a tensor nothing of shorter ones: with
            these, lengths beyond are left out. So are those after one at which exact attention takes a second.

    Raises:
        TypeError, ValueError: tensors that do not fit together, something that is no mechanism, no row or key.

    Cost: exact attention a few times, at every length; memory is that of the products and of single rows.

    Example:
        >>> import torch
        >>> from saccade.mechanisms import Nystrom, Performer
        >>> _ = torch.manual_seed(0)
        >>> query, key, value = (torch.randn(1, 2, 64, 16) / 2 for _ in range(3))
        >>> comparison = compare(query, key, value, [Performer(4096), Performer(16), Nystrom(64, iterations=None)])
        >>> [row.verdict[:11] for row in comparison.rows]
        ['rough: anot', 'too far off', 'close to ex']
    """
    where = "compare"
    given = tuple(mechanisms) if isinstance(mechanisms, Sequence) else mechanisms
    if not isinstance(given, tuple) or not all(isinstance(one, Mechanism) for one in given):
        hint = "[saccade.mechanisms.Performer(256)]"
        raise type_error(where, "mechanisms", "be a list of mechanisms", repr(mechanisms)[:80], hint=hint)
    softmax = Softmax()
    exact = softmax(query, key, mask=mask)
    check_value(where, value, query, key, exact.dtype)
    if 0 in exact.shape:
        facts = [describe("query", query), describe("key", key)]
        raise value_error(where, "tensors", "hold at least one query and one key", list(exact.shape), facts=facts)
    case = _Case(query.detach(), key.detach(), value.detach(), mask)
    rule = as_mask(mask, exact.shape, where=where)
    with torch.no_grad():
        expected = (exact @ value).detach()
        reasons = [one.reasons(rule) for one in given]
        able = [one for one, why in zip(given, reasons, strict=True) if not why]
        timed = _timed([softmax, *able], case, _lengths(timed_lengths, case, rule))
        rows = iter(_numbers(one, case, exact, expected) for one in able)
        times = iter(range(1, len(able) + 1))
        names = _names(given)
        compared = tuple(
            Compared(name, reasons=why) if why else _row(name, next(rows), timed, next(times), exact.shape[3])
            for name, why in zip(names, reasons, strict=True)
        )
        memory = _peak_bytes(lambda: softmax(query, key, mask=mask) @ value, query.device)
    own = timed[exact.shape[3]]
    lengths_timed = tuple(sorted(timed))
    return Comparison(compared, exact.shape, own[0], memory, lengths_timed, query.device.type == "cuda")


class _Case(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    mask: object

    def at(self, length: int) -> _Case:
        """The same for so many keys."""
        q_len, kv_len = self.query.shape[2], self.key.shape[2]
        if length == kv_len:
            return self
        q = torch.arange(max(1, length * q_len // kv_len), device=self.query.device) % q_len
        kv = torch.arange(length, device=self.query.device) % kv_len
        return _Case(self.query[:, :, q], self.key[:, :, kv], self.value[:, :, kv], self.mask)

    def run(self, mechanism: Mechanism) -> Tensor:
        return mechanism(self.query, self.key, mask=self.mask) @ self.value


def _names(mechanisms: Sequence[Mechanism]) -> list[str]:
    """Class names, with as much of what they were told as it takes to tell them apart."""
    told = [(type(one).__name__, one.extra_repr()) for one in mechanisms]
    plain = [name for name, _ in told]
    first = [f"{name}({what.split(',')[0]})" for name, what in told]
    whole = [f"{name}({what})" for name, what in told]
    return [next((form[i] for form in (plain, first) if form.count(form[i]) == 1), whole[i]) for i in range(len(told))]


def _numbers(
    mechanism: Mechanism, case: _Case, exact: Matrix, expected: Tensor
) -> tuple[float, float, float, float, float]:
    matrix = mechanism(case.query, case.key, mask=case.mask)
    out = (matrix @ case.value).double()
    size = expected.double().norm(dim=-1)
    errors = ((out - expected.double()).norm(dim=-1) / size)[size > 0]
    distances = []
    picked = torch.linspace(0, math.prod(exact.shape[:3]) - 1, min(_SAMPLED, math.prod(exact.shape[:3])))
    for place in picked.round().to(torch.int64).tolist():
        rest, i = divmod(place, exact.shape[2])
        b, h = divmod(rest, exact.shape[1])
        distances.append(float((matrix[b, h, i].double() - exact[b, h, i].double()).abs().sum() / 2))
    distance = torch.tensor(distances)
    memory = _peak_bytes(lambda: case.run(mechanism), case.query.device)
    found = [_median_and_worst(x) for x in (errors, distance)]
    return (*found[0], *found[1], memory)


def _median_and_worst(x: Tensor) -> tuple[float, float]:
    return (float(x.median()), float(x.max())) if x.numel() else (math.nan, math.nan)


def _row(
    name: str,
    numbers: tuple[float, float, float, float, float],
    timed: dict[int, list[float]],
    index: int,
    kv_len: int,
) -> Compared:
    ratios = {length: row[0] / row[index] for length, row in sorted(timed.items()) if not math.isnan(row[index])}
    median, worst, distance, farthest, memory = numbers
    seconds = timed[kv_len][index]
    return Compared(name, median, worst, distance, farthest, seconds, memory, crossing(ratios), max(ratios, default=0))


def crossing(ratios: dict[int, float]) -> int | None:
    """From which length on a ratio, given at some lengths, stays at least 1; None if it does not at the last."""
    since: int | None = None
    later: tuple[int, float] | None = None
    for length, ratio in sorted(ratios.items(), reverse=True):
        if ratio < 1.0:
            if later is None:
                return None
            # Straight between two lengths, both axes in logarithms: where the line meets 1.
            share = -math.log(ratio) / (math.log(later[1]) - math.log(ratio))
            return round(math.exp(math.log(length) + share * (math.log(later[0]) - math.log(length))))
        since, later = length, (length, ratio)
    return since


def _lengths(lengths: Sequence[int] | None, case: _Case, rule: Mask) -> list[int]:
    kv_len = case.key.shape[2]
    if lengths is None:
        wanted = [kv_len // 8, kv_len // 4, kv_len // 2, kv_len, 2 * kv_len, 4 * kv_len]
    else:
        if isinstance(lengths, str) or not isinstance(lengths, Sequence) or not lengths:
            raise type_error("compare", "timed_lengths", "be a list of ints of at least 1", repr(lengths))
        if not all(is_integer(n) and n >= 1 for n in lengths):
            raise value_error("compare", "timed_lengths", "be a list of ints of at least 1", list(lengths))
        wanted = list(lengths)
    if not (case.mask is None or isinstance(case.mask, Mask)):
        wanted = []
    elif not _says_all_lengths(rule):
        wanted = [n for n in wanted if n <= kv_len]
    return sorted({max(1, n) for n in (*wanted, kv_len)})  # the own length is always among them


def _says_all_lengths(rule: Mask) -> bool:
    """True if a mask is a rule for texts of any length; one that is not known may hold facts of a batch."""
    if isinstance(rule, And | Or):
        return all(_says_all_lengths(part) for part in rule.parts)
    if isinstance(rule, Not | After):
        return _says_all_lengths(rule.part if isinstance(rule, Not) else rule.rule)
    return not isinstance(rule, Padding | Documents | Dense | Predicate)


def _timed(mechanisms: Sequence[Mechanism], case: _Case, lengths: Sequence[int]) -> dict[int, list[float]]:
    """Seconds of a product, by length, exact attention first; NaN for one that takes no such length."""
    own = case.key.shape[2]
    found: dict[int, list[float]] = {}
    for length in lengths:
        if length > own and max(times[0] for times in found.values()) > _PATIENCE:
            break
        at = case.at(length)
        runs: list[list[float]] = [[] for _ in mechanisms]
        for turn in range(_ROUNDS + 1):  # in turn, so that a drift of the machine hits all; the first warms up
            for mechanism, times in zip(mechanisms, runs, strict=True):
                seconds = _seconds(mechanism, at, is_own=length == own)
                if turn:
                    times.append(seconds)
        found[length] = [statistics.median(times) for times in runs]
    return found


def _seconds(mechanism: Mechanism, case: _Case, *, is_own: bool) -> float:
    _wait(case.query.device)
    start = time.perf_counter()
    try:
        case.run(mechanism)
    except ValueError:
        if is_own:
            raise
        return math.nan  # a mechanism of fixed length, at another one
    _wait(case.query.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_bytes(call: Callable[[], object], device: torch.device) -> float:
    """Most bytes that a call holds at a time beside what was there before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return float(torch.cuda.max_memory_allocated(device) - before)
    return float(counted(call).most)


def _duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _size(size: float) -> str:
    if math.isnan(size):
        return "-"
    return f"{size / 2**20:.3g} MiB" if size >= 2**20 else f"{size / 2**10:.3g} KiB"
