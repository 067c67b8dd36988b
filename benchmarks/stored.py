"""How much faster is exact attention that never stores its weights than attention that does, as textbooks write it?"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import saccade as sc
from benchmarks.checking import assert_agree
from benchmarks.measuring import Referee, compare
from benchmarks.reporting import Row, ratio_row
from saccade import masks

SIZES, HEADS, DIM, ROUNDS = (1024, 4096), 8, 64, 10
TITLE = f"weights that are stored, {HEADS} heads of {DIM}, float32"
TITLE_ZH = f"存下权重的注意力，{HEADS} 个头，每头宽 {DIM}，float32"
FASTER = 2.0  # what is said of tiled attention: two to four times
_CAUSAL = masks.Causal()


class Case(NamedTuple):
    """Inputs, whether they are causal, and whether gradients are taken too."""

    tensors: list[Tensor]
    causal: bool
    trains: bool

    def ours(self) -> list[Tensor]:
        """One side."""
        return self._results(sc.attention(*self.tensors, _CAUSAL if self.causal else None))

    def theirs(self) -> list[Tensor]:
        """The other: all weights in one tensor."""
        query, key, value = self.tensors
        scores = query @ key.mT * query.shape[-1] ** -0.5
        if self.causal:
            n = query.shape[2]
            scores = scores.masked_fill_(torch.ones(n, n, dtype=torch.bool).triu_(1), float("-inf"))
        return self._results(scores.softmax(-1) @ value)

    def _results(self, out: Tensor) -> list[Tensor]:
        return [out, *torch.autograd.grad(out, self.tensors, torch.ones_like(out))] if self.trains else [out]


def case(n: int, causal: bool, trains: bool) -> Case:
    """Random inputs."""
    return Case([torch.randn(1, HEADS, n, DIM, requires_grad=trains) for _ in range(3)], causal, trains)


def check(its: Case) -> None:
    """Both sides agree."""
    for own, other in zip(its.ours(), its.theirs(), strict=True):
        assert_agree(own, other)


def measure(referee: Referee) -> Iterator[Row]:
    """Rows of this question."""
    for n, causal, trains in itertools.product(SIZES, (False, True), (False, True)):
        its = case(n, causal, trains)
        check(its)
        pair = compare(its.ours, its.theirs, rounds=ROUNDS, referee=referee)
        name = f"{'causal' if causal else 'full'}, n={n}{', with backward' if trains else ''}"
        yield ratio_row(name, pair, peer="weights stored", target=FASTER)
