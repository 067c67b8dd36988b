"""compare(): how wrong, how fast, and from which length on."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.memory_accounting import counted
from saccade.engine.validation import check_value
from saccade.masks import Mask, as_mask
from saccade.matrix import Matrix
from saccade.mechanisms import Mechanism, Softmax
from saccade.mechanisms.compare_table import CLOSE, ROUGH, Compared, Comparison
from saccade.support.argument_hints import answers
from saccade.support.errors import describe, type_error, value_error
from saccade.support.numerics import widest_dtype
from saccade.support.validation import is_integer

__all__ = ["CLOSE", "ROUGH", "Compared", "Comparison", "compare"]

_SAMPLED = 64  # rows whose distributions are compared
_ROUNDS = 3
_PATIENCE = 1.0  # seconds of one exact product, from which on no longer one is timed


@answers({}, mechanisms="a list, as [mechanisms.Performer(64)]")
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


def _compared(
    name: str,
    mechanism: Mechanism,
    case: _Case,
    exact: Matrix,
    expected: Tensor,
    exact_times: dict[int, float],
    times: dict[int, float],
) -> Compared:
    matrix = mechanism(case.query, case.key, mask=case.mask)
    size = expected.norm(dim=-1)
    errors = ((matrix @ case.value).to(expected) - expected).norm(dim=-1) / size
    count, distances = math.prod(exact.shape[:3]), []
    for place in torch.linspace(0, count - 1, min(_SAMPLED, count)).round().long():
        b, h, i = (int(x) for x in torch.unravel_index(place, exact.shape[:3]))
        distances.append((matrix[b, h, i].to(expected) - exact[b, h, i].to(expected)).abs().sum() / 2)
    ratios = {length: exact_times[length] / own for length, own in times.items() if not math.isnan(own)}
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
    """Where to time, the own length always among it."""
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
    """Seconds of a product by length, exact attention first; NaN at a length that a mechanism does not take."""
    own = case.key.shape[2]
    found: list[dict[int, float]] = [{} for _ in mechanisms]
    for length in lengths:
        if length > own and max(found[0].values()) > _PATIENCE:
            break
        at = case.at(length)
        runs: list[list[float]] = [[] for _ in mechanisms]
        for turn in range(_ROUNDS + 1):  # in turn, so that a drift of the machine hits all; the first warms up
            for mechanism, times in zip(mechanisms, runs, strict=True):
                seconds = _seconds(mechanism, at, is_own=length == own)
                if turn:
                    times.append(seconds)
        for times, by_length in zip(runs, found, strict=True):
            by_length[length] = statistics.median(times)
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
    if device.type != "cuda":
        return float(counted(call).most)
    _wait(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    _wait(device)
    return float(torch.cuda.max_memory_allocated(device) - before)
