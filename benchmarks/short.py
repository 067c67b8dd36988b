"""Cost of a short sequence beside SDPA, where every microsecond of Python shows."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import saccade as sc
from benchmarks.checking import assert_agree
from benchmarks.measuring import Referee, compare
from benchmarks.reporting import Row, duration
from saccade import masks

SIZES, HEADS, DIM = (16, 64, 128, 256, 512), 8, 64
TITLE = f"short sequences, {HEADS} heads of {DIM}, float32"
TITLE_ZH = f"短序列，{HEADS} 个头，每头宽 {DIM}，float32"
SHORTEST, FACTOR, EXTRA = 2.0, 1.2, 20e-6  # the shortest may take twice as long, others a fifth and some Python longer
_CAUSAL = masks.Causal()


class Case(NamedTuple):
    """The inputs, whether they are causal, and whether gradients are computed, too."""

    tensors: list[Tensor]
    causal: bool
    trains: bool

    def ours(self) -> list[Tensor]:
        """Run this library."""
        return self._results(sc.attention(*self.tensors, _CAUSAL if self.causal else None))

    def theirs(self) -> list[Tensor]:
        """Run the peer that this library is compared with."""
        return self._results(F.scaled_dot_product_attention(*self.tensors, is_causal=self.causal))

    def _results(self, out: Tensor) -> list[Tensor]:
        return [out, *torch.autograd.grad(out, self.tensors, torch.ones_like(out))] if self.trains else [out]


def case(n: int, causal: bool, trains: bool) -> Case:
    """Return random inputs."""
    return Case([torch.randn(1, HEADS, n, DIM, requires_grad=trains) for _ in range(3)], causal, trains)


def check(its: Case) -> None:
    """Check that both sides agree."""
    for own, other in zip(its.ours(), its.theirs(), strict=True):
        assert_agree(own, other)


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    for n, causal, trains in itertools.product(SIZES, (False, True), (False, True)):
        its = case(n, causal, trains)
        check(its)
        rounds = (1000 if n <= 128 else 200) // (2 if trains else 1)
        pair = compare(its.ours, its.theirs, rounds=rounds, referee=referee, batch=rounds // 4, warm_up=50)
        extra = EXTRA * (2 if trains else 1)
        allowed = SHORTEST * pair.theirs if n == min(SIZES) else FACTOR * pair.theirs + extra
        yield Row(
            f"{'causal' if causal else 'full'}, n={n}{', with backward' if trains else ''}",
            f"{duration(pair.ours)}, SDPA {duration(pair.theirs)}",
            f"at most {duration(allowed)}",
            pair.ours <= allowed,
            {"ratio": pair.ratio, "ours_s": pair.ours, "theirs_s": pair.theirs},
            pair.rate,
            pair.quiet,
        )
