"""Growth of time and memory with the length, and the cost of exact causal attention over 100,000 tokens."""

import functools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import saccade as sc
from benchmarks.checking import assert_rows_by_definition
from benchmarks.measuring import Call, Referee, Rounds, in_turn, slope
from benchmarks.memory import Job, extra_bytes
from benchmarks.plotting import Curve, drawn, png
from benchmarks.reporting import OUT, Row, duration, replace, share
from saccade import masks
from saccade.masks import Mask

SIZES = tuple(1 << power for power in range(12, 17))
DIM = 64
LONGEST = 100_000
TITLE = f"growth, {SIZES[0]} to {SIZES[-1]} tokens, one head of {DIM}, float32, forward"
TITLE_ZH = f"随长度的增长，{SIZES[0]:,} 到 {SIZES[-1]:,} 个词元，一个宽 {DIM} 的头，float32，前向"
MOST_MEMORY = 3.0  # of the bytes of query + key + value
WINDOW = 256
DENSE = f"SDPA, window ±{WINDOW} as a mask"
DENSE_SIZES = SIZES[:4]  # the mask of the next size takes 16 GiB


class Pattern(NamedTuple):
    """A mask for every length, with the allowed growth of time and memory."""

    make: Callable[[int], Mask]
    most_time_slope: float = 1.1
    most_memory_slope: float = 1.1


PATTERNS = {
    f"window ±{WINDOW}": Pattern(lambda n: masks.Window(WINDOW, WINDOW)),
    "longformer ±256, token 0": Pattern(lambda n: masks.longformer(256, [0])),
    "bigbird, blocks of 64": Pattern(lambda n: masks.bigbird(64)),
    "streaming, 4 + 1024": Pattern(lambda n: masks.streaming(4, 1024)),
    "causal documents of 512": Pattern(
        lambda n: masks.Documents([min(512, n - start) for start in range(0, n, 512)], rule=masks.Causal())
    ),
    "strided, step √n": Pattern(lambda n: masks.sparse_transformer(math.isqrt(n)), most_time_slope=1.6),
}


def inputs(n: int) -> list[Tensor]:
    """Return query, key and value of one head."""
    torch.manual_seed(0)
    return [torch.randn(1, 1, n, DIM) for _ in range(3)]


def check(n: int, names: tuple[str, ...] = tuple(PATTERNS)) -> None:
    """Check rows spread over the sequence against the definition of each mask."""
    tensors = inputs(n)
    for name in names:
        mask = PATTERNS[name].make(n)
        assert_rows_by_definition(sc.attention(*tensors, mask), tensors, mask)


def terms(n: int) -> Tensor:
    """Build the window for SDPA, 0 at allowed pairs and -inf elsewhere, ``[n, n]``, band by band."""
    made, columns = torch.full((n, n), -torch.inf), torch.arange(n)
    for rows in columns.split(64):
        made[rows[0] : rows[-1] + 1].masked_fill_((rows[:, None] - columns).abs() <= WINDOW, 0.0)
    return made


def dense(tensors: list[Tensor], mask: Tensor) -> Tensor:
    """Run SDPA with a mask: all pairs."""
    return F.scaled_dot_product_attention(*tensors, attn_mask=mask)


def check_dense(n: int) -> None:
    """Check that SDPA computes the same window."""
    tensors = inputs(n)
    assert_rows_by_definition(dense(tensors, terms(n)), tensors, masks.Window(WINDOW, WINDOW))


def dense_memory_of(n: int) -> Call:
    """Return SDPA with its dense mask for `extra_bytes`; this library needs no dense mask."""
    tensors, few = inputs(n), min(n, 2048)
    dense([x[:, :, :few] for x in tensors], terms(few))
    return lambda: dense(tensors, terms(n))


def memory_of(name: str, n: int) -> Call:
    """Return one product with its inputs for `extra_bytes`, after a first run."""
    make = (lambda n: masks.Causal()) if name == "causal" else PATTERNS[name].make
    tensors, few = inputs(n), min(n, 2048)
    sc.attention(*(x[:, :, :few] for x in tensors), make(few))
    return functools.partial(sc.attention, *tensors, make(n))


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question, draw growth.png and return the rows."""
    curves: dict[str, Curve] = {}
    for name, pattern in PATTERNS.items():
        check(SIZES[-1], (name,))
        taken = times_of(pattern, referee)
        extras = extra_bytes([Job("benchmarks.growth:memory_of", [name, n]) for n in SIZES])
        curves[name] = Curve([taken.median(call) for call in range(len(SIZES))], extras)
        yield row_of(name, pattern, curves[name], taken)
    check_dense(DENSE_SIZES[0])
    taken = dense_times(referee)
    extras = extra_bytes([Job("benchmarks.growth:dense_memory_of", [n]) for n in DENSE_SIZES])
    curves[DENSE] = Curve([taken.median(call) for call in range(len(DENSE_SIZES))], extras)
    yield row_of(DENSE, None, curves[DENSE], taken)
    replace(OUT / "growth.png", png(drawn(SIZES, curves)))
    yield _longest(referee)


def times_of(pattern: Pattern, referee: Referee) -> Rounds:
    """Time every size once per round, so that a drift of the machine does not look like growth."""
    calls = [functools.partial(sc.attention, *inputs(n), pattern.make(n)) for n in SIZES]
    return in_turn(calls, rounds=5, referee=referee)


def dense_times(referee: Referee) -> Rounds:
    """Time SDPA at its sizes, with masks built beforehand."""
    calls = [functools.partial(dense, inputs(n), terms(n)) for n in DENSE_SIZES]
    return in_turn(calls, rounds=3, referee=referee)


def row_of(name: str, pattern: Pattern | None, curve: Curve, taken: Rounds) -> Row:
    """Return the row of slopes with their targets; patterns of other libraries have none."""
    sizes = SIZES[: len(curve.times)]
    time_slope = statistics.median(slope(sizes, times) for times in taken.times)
    memory_slope = slope(sizes, curve.extras)
    ends = f"{duration(curve.times[0])} to {duration(curve.times[-1])}"
    extras = f"{curve.extras[0] / 2**20:.0f} to {curve.extras[-1] / 2**20:.0f} MiB"
    upto = f", up to {sizes[-1]} tokens" if sizes != SIZES else ""
    target, met = "", None
    if pattern is not None:
        target = f"at most n^{pattern.most_time_slope:g}, n^{pattern.most_memory_slope:g}"
        met = time_slope <= pattern.most_time_slope and memory_slope <= pattern.most_memory_slope
    return Row(
        name,
        f"time n^{time_slope:.2f}, {ends}; memory n^{memory_slope:.2f}, {extras}{upto}",
        target,
        met,
        {
            "time_slope": time_slope,
            "memory_slope": memory_slope,
            **{f"seconds_{n}": time for n, time in zip(sizes, curve.times, strict=True)},
            **{f"bytes_{n}": extra for n, extra in zip(sizes, curve.extras, strict=True)},
        },
        taken.rate,
        taken.quiet,
    )


def _longest(referee: Referee) -> Row:
    tensors, mask = inputs(LONGEST), masks.Causal()
    assert_rows_by_definition(sc.attention(*tensors, mask), tensors, mask)
    taken = in_turn([functools.partial(sc.attention, *tensors, mask)], rounds=1, warm_up=0, referee=referee)
    (extra,) = extra_bytes([Job("benchmarks.growth:memory_of", ["causal", LONGEST])])
    size = sum(x.nbytes for x in tensors)
    flops = 4 * DIM * LONGEST * (LONGEST + 1) / 2
    time = taken.median(0)
    return Row(
        f"causal, exact, {LONGEST} tokens",
        f"memory {extra / size:.2f} of the inputs' ({extra / 2**20:.0f} MiB); {duration(time)}, "
        + share(flops, time, referee.peak),
        f"memory at most {MOST_MEMORY:g}",
        extra <= MOST_MEMORY * size,
        {"extra_bytes": extra, "input_bytes": size, "seconds": time},
        taken.rate,
        taken.quiet,
    )
