"""compare(): the error and cost of mechanisms, and the length from which they are faster than exact attention."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.check_inputs import check_value
from saccade.engine.memory_accounting import counted
from saccade.masks import Mask, as_mask
from saccade.matrix import Matrix
from saccade.mechanisms import Mechanism, Softmax
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import describe, type_error, value_error
from saccade.support.numerics import widest_dtype
from saccade.support.validation import is_integer

_SAMPLED = 64  # number of rows whose distributions are compared
_ROUNDS = 3
_PATIENCE = 1.0  # if one exact product takes more seconds than this, longer inputs are not timed


@argument_hints({}, mechanisms="a list, as [mechanisms.Performer(64)]")
def compare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mechanisms: Sequence[Mechanism],
    *,
    mask: object = None,
    timed_lengths: Sequence[int] | None = None,
) -> Comparison:
    """Compare mechanisms with exact softmax attention on your tensors: error, cost, and the length from which they win.

    Errors and memory are measured on the tensors as passed. Products are also timed at other lengths, on the first
    tokens or on repeated tokens, to find the length from which a mechanism is faster than exact attention on this
    machine.

    Args:
        query: ``[batch, heads, q_len, head_dim]``.
        key: ``[batch, kv_heads, kv_len, head_dim]``.
        value: ``[batch, kv_heads, kv_len, value_dim]``.
        mechanisms: the mechanisms to compare. One that does not support the mask gets a row with the reason.
        mask: anything that `saccade.attention` takes.
        timed_lengths: numbers of keys at which to time; ``kv_len`` / 8 to 4 ``kv_len`` when None. Masks that belong to
            one batch (Padding, Documents, a tensor) cannot be extended to longer inputs, and a tensor cannot be cut to
            shorter ones, so such lengths are skipped. Once exact attention takes a second, longer lengths are skipped
            too.

    Raises:
        TypeError, ValueError: tensors that do not fit together, an object that is not a mechanism, or no rows or keys.

    Cost: a few runs of exact attention at every length; memory for the products and for single rows.

    Example:
        >>> import torch
        >>> from saccade.mechanisms import Nystrom, Performer
        >>> _ = torch.manual_seed(0)
        >>> query, key, value = (torch.randn(1, 2, 64, 16) / 2 for _ in range(3))
        >>> comparison = compare(query, key, value, [Performer(4096), Performer(16), Nystrom(64, iterations=None)])
        >>> [row.verdict[:11] for row in comparison.rows]
        ['rough: anot', 'too far off', 'close to ex']
    """
    if not isinstance(mechanisms, Sequence) or not all(isinstance(one, Mechanism) for one in mechanisms):
        hint = "[saccade.mechanisms.Performer(256)]"
        raise type_error("mechanisms", "be a list of mechanisms", repr(mechanisms)[:80], hint=hint)
    given = tuple(mechanisms)
    softmax = Softmax()
    exact = softmax(query, key, mask=mask)
    check_value(value, query, key, exact.dtype)
    if 0 in exact.shape:
        facts = [describe("query", query), describe("key", key)]
        raise value_error("tensors", "hold at least one query and one key", list(exact.shape), facts=facts)
    case = _Case(query.detach(), key.detach(), value.detach(), mask)
    rule = as_mask(mask, exact.shape)
    with torch.no_grad():
        expected = (exact @ value).to(widest_dtype(value.device))
        reasons = [one.reasons(rule) for one in given]
        able = [one for one, why in zip(given, reasons, strict=True) if not why]
        exact_times, *others = _timed([softmax, *able], case, _lengths(timed_lengths, case, rule))
        times = iter(others)
        rows = tuple(
            Compared(name, reasons=why)
            if why
            else _compared(name, one, case, exact, expected, exact_times, next(times))
            for name, one, why in zip(_names(given), given, reasons, strict=True)
        )
        memory = _peak_bytes(lambda: softmax(query, key, mask=mask) @ value, query.device)
    seconds, lengths = exact_times[exact.shape[3]], tuple(sorted(exact_times))
    return Comparison(rows, exact.shape, seconds, memory, lengths, query.device.type == "cuda")


class _Case(NamedTuple):
    """The tensors and mask on which mechanisms are compared."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: object

    def at(self, length: int) -> _Case:
        """Return the tensors of the comparison with a different number of keys, by cutting or repeating tokens."""
        q_len, kv_len = self.query.shape[2], self.key.shape[2]
        if length == kv_len:
            return self
        q = torch.arange(max(1, length * q_len // kv_len), device=self.query.device) % q_len
        kv = torch.arange(length, device=self.query.device) % kv_len
        return _Case(self.query[:, :, q], self.key[:, :, kv], self.value[:, :, kv], self.mask)

    def run(self, mechanism: Mechanism) -> Tensor:
        return mechanism(self.query, self.key, mask=self.mask) @ self.value


def _names(mechanisms: Sequence[Mechanism]) -> list[str]:
    """Return the class names of the compared mechanisms, with arguments if they are needed to distinguish them."""
    arguments = [(type(one).__name__, one.extra_repr()) for one in mechanisms]
    plain = [name for name, _ in arguments]
    first = [f"{name}({what.split(',')[0]})" for name, what in arguments]
    whole = [f"{name}({what})" for name, what in arguments]
    return [
        next((form[i] for form in (plain, first) if form.count(form[i]) == 1), whole[i]) for i in range(len(arguments))
    ]


def _compared(
    name: str,
    mechanism: Mechanism,
    case: _Case,
    exact: Matrix,
    expected: Tensor,
    exact_times: dict[int, float],
    times: dict[int, float],
) -> Compared:
    """Return the comparison's row for one mechanism: its errors against exact attention, its times and memory."""
    matrix = mechanism(case.query, case.key, mask=case.mask)
    size = expected.norm(dim=-1)
    errors = ((matrix @ case.value).to(expected) - expected).norm(dim=-1) / size
    count, distances = math.prod(exact.shape[:3]), []
    for place in torch.linspace(0, count - 1, min(_SAMPLED, count)).round().long():
        b, h, i = (int(x) for x in torch.unravel_index(place, exact.shape[:3]))
        distances.append((matrix[b, h, i].to(expected) - exact[b, h, i].to(expected)).abs().sum() / 2)
    ratios = {length: exact_times[length] / seconds for length, seconds in times.items() if not math.isnan(seconds)}
    return Compared(
        name,
        *_median_and_worst(errors[size > 0]),
        *_median_and_worst(torch.stack(distances)),
        times[exact.shape[3]],
        _peak_bytes(lambda: case.run(mechanism), case.query.device),
        crossing(ratios),
        max(ratios, default=0),
    )


def _median_and_worst(x: Tensor) -> tuple[float, float]:
    return (float(x.median()), float(x.max())) if x.numel() else (math.nan, math.nan)


def crossing(ratios: dict[int, float]) -> int | None:
    """Return the length from which a mechanism is faster than exact attention.

    From this length on, the ratio of exact time to the time of the mechanism stays at 1 or above. If it ends below 1,
    return None.
    """
    since: int | None = None
    later: tuple[int, float] | None = None
    for length, ratio in sorted(ratios.items(), reverse=True):
        if ratio < 1.0:
            if later is None:
                return None
            # Interpolate linearly between two lengths, on logarithmic axes.
            share = -math.log(ratio) / (math.log(later[1]) - math.log(ratio))
            return round(math.exp(math.log(length) + share * (math.log(later[0]) - math.log(length))))
        since, later = length, (length, ratio)
    return since


def _lengths(lengths: Sequence[int] | None, case: _Case, rule: Mask) -> list[int]:
    """Return the numbers of keys at which mechanisms are timed. The actual number is always among them."""
    kv_len = case.key.shape[2]
    if lengths is None:
        lengths = [kv_len // 8, kv_len // 4, kv_len // 2, kv_len, 2 * kv_len, 4 * kv_len]
    else:
        what, must = "timed_lengths", "be a list of ints of at least 1"
        if isinstance(lengths, str) or not isinstance(lengths, Sequence) or not lengths:
            raise type_error(what, must, repr(lengths))
        if not all(is_integer(n) and n >= 1 for n in lengths):
            raise value_error(what, must, list(lengths))
    if not (case.mask is None or isinstance(case.mask, Mask)):
        lengths = []
    elif rule.is_fact_of_batch:
        lengths = [n for n in lengths if n <= kv_len]
    return sorted({max(1, n) for n in (*lengths, kv_len)})


def _timed(mechanisms: Sequence[Mechanism], case: _Case, lengths: Sequence[int]) -> list[dict[int, float]]:
    """Time exact attention and all mechanisms at all lengths; return seconds by length, NaN at unsupported lengths."""
    kv_len = case.key.shape[2]
    results: list[dict[int, float]] = [{} for _ in mechanisms]
    for length in lengths:
        if length > kv_len and max(results[0].values()) > _PATIENCE:
            break
        at = case.at(length)
        runs: list[list[float]] = [[] for _ in mechanisms]
        for turn in range(
            _ROUNDS + 1
        ):  # alternate, so that changes in the machine's speed affect all of them; the first round is a warm-up
            for mechanism, times in zip(mechanisms, runs, strict=True):
                seconds = _seconds(mechanism, at, is_own=length == kv_len)
                if turn:
                    times.append(seconds)
        for times, by_length in zip(runs, results, strict=True):
            by_length[length] = statistics.median(times)
    return results


def _seconds(mechanism: Mechanism, case: _Case, *, is_own: bool) -> float:
    """Return the median time of a mechanism's product in a comparison. If the inputs are not supported, return NaN."""
    _wait(case.query.device)
    start = time.perf_counter()
    try:
        case.run(mechanism)
    except ValueError:
        if is_own:
            raise
        return math.nan  # a mechanism of fixed length, at a different length
    _wait(case.query.device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_bytes(call: Callable[[], object], device: torch.device) -> float:
    """Return the peak memory that a compared mechanism allocates during a call, in bytes."""
    if device.type != "cuda":
        return float(counted(call).most)
    _wait(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    _wait(device)
    return float(torch.cuda.max_memory_allocated(device) - before)


CLOSE, ROUGH = 0.01, 0.1
"""Largest median relative errors of a result that is "close" to exact attention, and of one that is still useful."""


class Compared(NamedTuple):
    """The result of comparing one mechanism with exact attention.

    Attributes:
        name: name of the mechanism.
        error_median, error_worst: relative errors of the output's rows, ``|out - exact| / |exact|``, except for rows
            where exact attention is 0.
        distance_median, distance_worst: half the sum of absolute differences between rows of the two matrices, over a
            sample of the rows. For distributions this is the total variation: 0 if they are equal, 1 if they have
            nothing in common.
        seconds: median time of one product at the actual length.
        memory_bytes: peak memory that one product allocated, in bytes, including its output.
        faster_from: number of keys from which the mechanism is faster than exact attention, interpolated between the
            timed lengths. The shortest timed length if it is faster at all of them; None if it is slower at the
            longest.
        timed_to: the longest timed length, in keys.
        reasons: why the mechanism cannot run on these inputs; the numbers are then NaN.
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
        """Median error in words: "close" up to 1 %, "rough" up to 10 %, else "too far off to be of use"."""
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
    """A comparison of mechanisms with exact softmax attention on the tensors of one call; prints as a table.

    Attributes:
        rows: one for each mechanism, in the order of the arguments.
        shape: (batch, heads, q_len, kv_len).
        exact_seconds, exact_memory_bytes: time and memory of exact attention at the actual length.
        lengths: numbers of keys at which products were timed.
        is_measured: True if the device measured the memory. False if it was estimated from the tensors that torch's
            operations return, without the memory that the operations use internally.
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
            lines.append([row.name, *shares, _duration(row.seconds), _size(row.memory_bytes), self._faster_from(row)])
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        table = [
            "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(pairs))
            for pairs in (list(zip(line, widths, strict=True)) for line in lines)
        ]
        first = f"batch {batch}, {heads} heads, {q_len} queries, {kv_len} keys; errors relative to exact attention"
        verdicts = [f"{row.name}: {row.verdict}" for row in self.rows]
        return "\n".join([first, *(line.rstrip() for line in table), *verdicts])

    def _faster_from(self, row: Compared) -> str:
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
