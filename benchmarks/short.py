"""What does a short sequence cost beside SDPA, where every microsecond of Python shows?"""

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
TITLE = f"short sequences, {HEADS} heads of {DIM}, float32, forward"
FACTOR, EXTRA = 1.2, 20e-6
_CAUSAL = masks.Causal()


class Case(NamedTuple):
    """Inputs, and whether they are causal."""

    tensors: list[Tensor]
    causal: bool

    def ours(self) -> Tensor:
        """One side."""
        return sc.attention(*self.tensors, _CAUSAL if self.causal else None)

    def theirs(self) -> Tensor:
        """The other."""
        return F.scaled_dot_product_attention(*self.tensors, is_causal=self.causal)


def case(n: int, causal: bool) -> Case:
    """Random inputs."""
    return Case([torch.randn(1, HEADS, n, DIM) for _ in range(3)], causal)


def check(its: Case) -> None:
    """Both sides agree."""
    assert_agree(its.ours(), its.theirs())


def measure(referee: Referee) -> Iterator[Row]:
    """Rows of this question."""
    for n in SIZES:
        for causal in (False, True):
            its = case(n, causal)
            check(its)
            rounds = 1000 if n <= 128 else 200
            pair = compare(its.ours, its.theirs, rounds=rounds, referee=referee, batch=rounds // 4, warm_up=50)
            allowed = FACTOR * pair.theirs + EXTRA
            yield Row(
                f"{'causal' if causal else 'full'}, n={n}",
                f"{duration(pair.ours)}, SDPA {duration(pair.theirs)}",
                f"at most {duration(allowed)}",
                pair.ours <= allowed,
                {"ratio": pair.ratio, "ours_s": pair.ours, "theirs_s": pair.theirs},
                pair.rate,
                pair.quiet,
            )
