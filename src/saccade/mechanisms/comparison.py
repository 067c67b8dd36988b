"""compare(): the error and cost of mechanisms and masks, and the length from which they beat exact attention."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from saccade.caches import LayerCache
from saccade.engine.check_inputs import check_value
from saccade.engine.memory_accounting import counted
from saccade.masks import Mask, as_mask
from saccade.matrix import Matrix
from saccade.mechanisms import Mechanism, Softmax
from saccade.mechanisms.compared_caches import (
    ComparedCache,
    check_caches,
    compared_caches,
    median_and_worst,
    row_errors,
)
from saccade.mechanisms.comparison_contenders import Case, Masked, TorchSDPA
from saccade.mechanisms.comparison_result import CLOSE, ROUGH, Compared, Comparison
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import describe, type_error, value_error
from saccade.support.numerics import widest_dtype
from saccade.support.validation import is_integer

__all__ = ["CLOSE", "ROUGH", "Compared", "ComparedCache", "Comparison", "compare", "crossing"]

_SAMPLED = 64  # number of rows whose distributions are compared
_ROUNDS = 3
_LONGEST_NAME = 48
_PATIENCE = 1.0  # if one exact product takes more seconds than this, longer inputs are not timed


@argument_hints({}, mechanisms="pass a list such as [mechanisms.Performer(64), masks.sliding_window(256)]")
def compare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mechanisms: Sequence[Mechanism | Mask],
    *,
    mask: object = None,
    timed_lengths: Sequence[int] | None = None,
    quality: Callable[[Mechanism | Mask], float] | None = None,
    caches: Sequence[LayerCache] = (),
) -> Comparison:
    """Compare mechanisms and masks with exact attention on your tensors: error, time, memory and, optionally, quality.

    Errors and memory are measured on the tensors as passed. Products are also timed at other lengths, on the first
    tokens or on repeated tokens, to find the length from which a mechanism is faster than exact attention on this
    machine. The result prints as a table, which begins with exact attention and torch's
    ``F.scaled_dot_product_attention``.

    Args:
        query: ``[batch, heads, q_len, head_dim]``.
        key: ``[batch, kv_heads, kv_len, head_dim]``.
        value: ``[batch, kv_heads, kv_len, value_dim]``.
        mechanisms: the mechanisms and masks to compare. A mask stands for exact attention under this mask combined
            with ``mask``, so its error comes from the pairs that it masks. A mechanism that does not support ``mask``
            gets a row with the reason.
        mask: any mask that `saccade.attention` accepts. Exact attention with this mask is the reference.
        timed_lengths: numbers of keys at which to time; ``kv_len`` / 8 to 4 ``kv_len`` when None. Masks that belong to
            one batch (Padding, Documents, a tensor) cannot be extended to longer inputs, and a tensor cannot be cut to
            shorter ones, so such lengths are skipped. Once exact attention takes longer than a second, longer inputs
            are also skipped.
        quality: a function that returns a number for a mechanism or mask, such as the accuracy of a model trained with
            it; `saccade.learning.quality_on` returns such a function. It is also called for exact attention. When None,
            quality is not measured.
        caches: empty caches, such as ``[Int8Cache(), QuantizedCache(4)]``, to compare as well. Each gets a row with its
            size and its error when the tensors pass through it as a causal sequence, 64 tokens at a time. The caches
            stay empty.

    Raises:
        TypeError, ValueError: the shapes of the tensors do not match, ``mechanisms`` contains something other than
            mechanisms and masks, or there are no queries or keys.

    Cost: a few runs of every mechanism, of exact attention and of torch's SDPA at every length, plus the calls of
    ``quality``. Memory is needed for the products, for individual rows, and for the mask as a tensor for torch's SDPA
    (at most 1 GiB).

    Example:
        >>> import torch
        >>> from saccade.mechanisms import Nystrom, Performer
        >>> _ = torch.manual_seed(0)
        >>> query, key, value = (torch.randn(1, 2, 64, 16) / 2 for _ in range(3))
        >>> comparison = compare(query, key, value, [Performer(4096), Performer(16), Nystrom(64, iterations=None)])
        >>> [row.verdict[:11] for row in comparison.rows]
        ['rough: expe', 'too far off', 'close to ex']
        >>> from saccade.masks import Causal, sliding_window
        >>> comparison = compare(query, key, value, [sliding_window(63), sliding_window(16)], mask=Causal())
        >>> [(row.name, row.verdict[:11]) for row in comparison.rows]
        [('Causal() & Window(62, 0)', 'close to ex'), ('Causal() & Window(15, 0)', 'too far off')]
    """
    if not isinstance(mechanisms, Sequence) or not all(isinstance(one, Mechanism | Mask) for one in mechanisms):
        hint = "[saccade.mechanisms.Performer(256), saccade.masks.sliding_window(256)]"
        raise type_error("mechanisms", "be a list of mechanisms and masks", repr(mechanisms)[:80], hint=hint)
    check_caches(caches)
    given = tuple(Masked(one) if isinstance(one, Mask) else one for one in mechanisms)
    softmax = Softmax()
    exact = softmax(query, key, mask=mask)
    check_value(value, query, key, exact.dtype)
    if 0 in exact.shape:
        facts = [describe("query", query), describe("key", key)]
        raise value_error("tensors", "contain at least one query and one key", list(exact.shape), facts=facts)
    case = Case(query.detach(), key.detach(), value.detach(), mask)
    rule = as_mask(mask, exact.shape)
    with torch.no_grad():
        expected = (exact @ value).to(widest_dtype(value.device))
        sdpa_contender = TorchSDPA(rule)
        reasons = [one.reasons(rule) for one in given]
        supported = [one for one, why in zip(given, reasons, strict=True) if not why]
        sdpa_reasons = sdpa_contender.reasons(case)
        contenders: list[Mechanism | TorchSDPA] = [softmax, *supported, *([] if sdpa_reasons else [sdpa_contender])]
        exact_times, *others = _timed(contenders, case, _lengths_to_time(timed_lengths, case, rule))
        times = iter(others)
        rows = tuple(
            Compared(name, reasons=why)
            if why
            else _compared(name, one, case, exact, expected, exact_times, next(times))
            for name, one, why in zip(_names(given), given, reasons, strict=True)
        )
        sdpa = Compared("torch SDPA", reasons=sdpa_reasons)
        if not sdpa_reasons:
            sdpa = _compared(sdpa.name, sdpa_contender, case, exact, expected, exact_times, next(times))
        memory = _peak_bytes(lambda: softmax(query, key, mask=mask) @ value, query.device)
        stored = compared_caches(caches, case, rule, expected)
    qualities = [math.nan] * (len(rows) + 1) if quality is None else _qualities(quality, mechanisms, rows)
    rows = tuple(row._replace(quality=x) for row, x in zip(rows, qualities[1:], strict=True))
    seconds, lengths = exact_times[exact.shape[3]], tuple(sorted(exact_times))
    is_cuda = query.device.type == "cuda"
    return Comparison(rows, exact.shape, seconds, memory, lengths, is_cuda, sdpa, qualities[0], stored)


def _qualities(
    quality: Callable[[Mechanism | Mask], float], mechanisms: Sequence[Mechanism | Mask], rows: Sequence[Compared]
) -> list[float]:
    """Return the quality of exact attention and of each mechanism or mask, with NaN for those that cannot run."""
    return [
        quality(Softmax()),
        *(math.nan if row.reasons else quality(one) for one, row in zip(mechanisms, rows, strict=True)),
    ]


def _names(mechanisms: Sequence[Mechanism]) -> list[str]:
    """Return the class names of the compared mechanisms, with arguments if they are needed to distinguish them.

    A mask is named by its repr without argument names. Long names are shortened if they remain distinct.
    """
    names = _mechanism_names([one for one in mechanisms if not isinstance(one, Masked)])
    rules = [one.rule for one in mechanisms if isinstance(one, Masked)]
    texts = [re.sub(r"\b[a-z_]+=", "", repr(rule)).replace(", True, True)", ")") for rule in rules]
    cut = [text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 3]}..." for text in texts]
    short = [name if cut.count(name) == 1 else text for name, text in zip(cut, texts, strict=True)]
    plain, masked = iter(names), iter(short)
    return [next(masked) if isinstance(one, Masked) else next(plain) for one in mechanisms]


def _mechanism_names(mechanisms: Sequence[Mechanism]) -> list[str]:
    arguments = [(type(one).__name__, one.extra_repr()) for one in mechanisms]
    plain = [name for name, _ in arguments]
    first = [f"{name}({what.split(',')[0]})" for name, what in arguments]
    whole = [f"{name}({what})" for name, what in arguments]
    return [
        next((form[i] for form in (plain, first) if form.count(form[i]) == 1), whole[i]) for i in range(len(arguments))
    ]


def _compared(
    name: str,
    contender: Mechanism | TorchSDPA,
    case: Case,
    exact: Matrix,
    expected: Tensor,
    exact_times: dict[int, float],
    times: dict[int, float],
) -> Compared:
    """Return the comparison's row for one contender: its errors, times and memory."""
    errors = row_errors(case.run(contender), expected)
    distances, mask_bytes = (math.nan, math.nan), 0
    if isinstance(contender, TorchSDPA):  # torch's SDPA has no matrix to compare
        mask = contender.prepare(case)
        mask_bytes = 0 if mask is None else mask.nbytes
    else:
        distances = _distances(contender(case.query, case.key, mask=case.mask), exact, expected)
    ratios = {length: exact_times[length] / seconds for length, seconds in times.items() if not math.isnan(seconds)}
    return Compared(
        name,
        *errors,
        *distances,
        times[exact.shape[3]],
        _peak_bytes(lambda: case.run(contender), case.query.device) + mask_bytes,
        crossing(ratios),
        max(ratios, default=0),
        hides_nothing=isinstance(contender, Masked)
        and errors[1] <= CLOSE
        and _hides_nothing(contender.rule, case.mask, exact.shape),
    )


def _hides_nothing(mask: Mask, reference: object, shape: tuple[int, int, int, int]) -> bool:
    """Return whether a mask allows all pairs that the reference mask allows."""
    allowed = as_mask(reference, shape)
    batch, heads, q_len, kv_len = shape
    return (allowed & ~mask).count(q_len, kv_len, batch=batch, heads=heads) == 0


def _distances(matrix: Matrix, exact: Matrix, expected: Tensor) -> tuple[float, float]:
    """Return the median and the largest distance between rows of two matrices, over a sample of the rows."""
    count, distances = math.prod(exact.shape[:3]), []
    for index in torch.linspace(0, count - 1, min(_SAMPLED, count)).round().long():
        b, h, i = (int(x) for x in torch.unravel_index(index, exact.shape[:3]))
        distances.append((matrix[b, h, i].to(expected) - exact[b, h, i].to(expected)).abs().sum() / 2)
    return median_and_worst(torch.stack(distances))


def crossing(ratios: dict[int, float]) -> int | None:
    """Return the length from which a mechanism is faster than exact attention.

    ``ratios`` maps each length to the time of exact attention divided by that of the mechanism. From the returned
    length on, the ratio is at least 1. If it is below 1 at the greatest length, return None.
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


def _lengths_to_time(lengths: Sequence[int] | None, case: Case, rule: Mask) -> list[int]:
    """Return the numbers of keys at which mechanisms are timed, always including the actual number."""
    kv_len = case.key.shape[2]
    if lengths is None:
        lengths = [kv_len // 8, kv_len // 4, kv_len // 2, kv_len, 2 * kv_len, 4 * kv_len]
    else:
        name, must = "timed_lengths", "be a list of ints of at least 1"
        if isinstance(lengths, str) or not isinstance(lengths, Sequence) or not lengths:
            raise type_error(name, must, repr(lengths))
        if not all(is_integer(n) and n >= 1 for n in lengths):
            raise value_error(name, must, list(lengths))
    if not (case.mask is None or isinstance(case.mask, Mask)):
        lengths = []
    elif rule.is_fact_of_batch:
        lengths = [n for n in lengths if n <= kv_len]
    return sorted({max(1, n) for n in (*lengths, kv_len)})


def _timed(mechanisms: Sequence[Mechanism | TorchSDPA], case: Case, lengths: Sequence[int]) -> list[dict[int, float]]:
    """Return the seconds that each mechanism takes, by length, with NaN at unsupported lengths.

    The first mechanism must be exact attention. Lengths above ``kv_len`` are skipped once it takes too long.
    """
    kv_len = case.key.shape[2]
    results: list[dict[int, float]] = [{} for _ in mechanisms]
    is_of_batch = [isinstance(one, Masked) and one.rule.is_fact_of_batch for one in mechanisms]
    for length in lengths:
        if length > kv_len and max(results[0].values()) > _PATIENCE:
            break
        at = case.at(length)
        runs: list[list[float]] = [[] for _ in mechanisms]
        for turn in range(
            _ROUNDS + 1
        ):  # take turns, so that changes in the machine's speed affect all of them; the first round is a warm-up
            for mechanism, is_bound, times in zip(mechanisms, is_of_batch, runs, strict=True):
                is_beyond = is_bound and length > kv_len
                seconds = math.nan if is_beyond else _seconds(mechanism, at, is_actual_length=length == kv_len)
                if turn:
                    times.append(seconds)
        for times, by_length in zip(runs, results, strict=True):
            by_length[length] = statistics.median(times)
    return results


def _seconds(mechanism: Mechanism | TorchSDPA, case: Case, *, is_actual_length: bool) -> float:
    """Return the seconds that a mechanism's product takes, or NaN if the mechanism does not support the length."""
    try:
        if isinstance(mechanism, TorchSDPA):
            mechanism.prepare(case)  # not timed
        _wait(case.query.device)
        start = time.perf_counter()
        case.run(mechanism)
    except ValueError:
        if is_actual_length:
            raise
        return math.nan  # a mechanism for another fixed length, or torch's SDPA with too large a mask tensor
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
