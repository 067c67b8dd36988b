"""Cost of every statistic of a head beside the product that the head computes."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

import saccade as sc
from benchmarks.measuring import Call, Referee, in_turn, median_ratio
from benchmarks.memory import Job, extra_bytes
from benchmarks.reporting import Row, duration
from saccade import masks
from saccade.engine.kernels.native import is_on
from saccade.statistics import Coverage, LagProfile, Pooled, TopK

N, LONGEST, DIM = 32_768, 100_000, 64
TITLE = f"statistics, causal, one head of {DIM}, float32"
TITLE_ZH = f"统计量，因果，一个宽 {DIM} 的头，float32"
MOST_FORWARDS = 1.5 if is_on() else 5.0  # of the kernel that runs without saccade-cpu
MOST_BYTES = 400_000_000
_CAUSAL = masks.Causal()


def inputs(n: int) -> list[Tensor]:
    """Return query, key and value of one head."""
    torch.manual_seed(0)
    return [torch.randn(1, 1, n, DIM) for _ in range(3)]


def forward(tensors: list[Tensor]) -> Tensor:
    """Run one product with the kernel that runs without saccade-cpu."""
    return sc.attention(*tensors, _CAUSAL, impl="fused")


def summary(tensors: list[Tensor]) -> object:
    """Compute all statistics of the default table on a new matrix, so that none is cached."""
    return sc.AttentionMatrix(tensors[0], tensors[1], _CAUSAL).summary()


def others(tensors: list[Tensor]) -> object:
    """Compute the statistics that a summary leaves out."""
    return sc.AttentionMatrix(tensors[0], tensors[1], _CAUSAL).compute(TopK(8), LagProfile(), Pooled(256), Coverage())


def check(n: int) -> None:
    """Check the table against the dense matrix."""
    tensors = inputs(n)
    scores = (tensors[0] @ tensors[1].mT * DIM**-0.5).double()
    dense = scores.masked_fill(~_CAUSAL.to_dense(n), -torch.inf).softmax(-1)
    found = sc.AttentionMatrix(tensors[0], tensors[1], _CAUSAL).summary()
    entropy = torch.special.entr(dense).sum(-1).mean(-1)
    torch.testing.assert_close(found.named("entropy").values.double(), entropy, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.received.double(), dense.sum(-2), rtol=1e-4, atol=1e-4)


def memory_of(n: int) -> Call:
    """Return one summary with its inputs for `extra_bytes`, after a first run."""
    tensors = inputs(n)
    summary([x[:, :, :2048] for x in tensors])
    return functools.partial(summary, tensors)


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    check(512)
    tensors = inputs(N)
    (extra,) = extra_bytes([Job("benchmarks.looking:memory_of", [N])])
    taken = in_turn(
        [functools.partial(call, tensors) for call in (forward, summary, others)], rounds=3, referee=referee
    )
    factor = median_ratio([times[:2] for times in taken.times])
    rest = median_ratio([[times[0], times[2]] for times in taken.times])
    yield Row(
        f"summary(), {N} tokens",
        f"{factor:.1f} forwards ({duration(taken.median(1))}), {extra / 1e6:.0f} MB; dense {4 * N * N / 1e9:.1f} GB",
        f"at most {MOST_FORWARDS:g} forwards, {MOST_BYTES / 1e6:.0f} MB",
        factor <= MOST_FORWARDS and extra <= MOST_BYTES,
        {"forwards": factor, "extra_bytes": extra, "seconds": taken.median(1)},
        taken.rate,
        taken.quiet,
    )
    yield Row(
        f"top-8, lags, map, coverage, {N} tokens",
        f"{rest:.1f} forwards ({duration(taken.median(2))})",
        "",
        None,
        {"forwards": rest, "seconds": taken.median(2)},
        taken.rate,
        taken.quiet,
    )
    yield _longest(referee)


def _longest(referee: Referee) -> Row:
    tensors = inputs(LONGEST)
    taken = in_turn([functools.partial(summary, tensors)], rounds=1, warm_up=0, referee=referee)
    (extra,) = extra_bytes([Job("benchmarks.looking:memory_of", [LONGEST])])
    return Row(
        f"summary(), {LONGEST} tokens",
        f"{duration(taken.median(0))}, {extra / 1e6:.0f} MB; dense {4 * LONGEST**2 / 1e9:.0f} GB",
        f"at most {MOST_BYTES / 1e6:.0f} MB",
        extra <= MOST_BYTES,
        {"seconds": taken.median(0), "extra_bytes": extra},
        taken.rate,
        taken.quiet,
    )
