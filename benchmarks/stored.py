"""Speed of exact attention that never stores its weights, beside textbook attention that does."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks import short
from benchmarks.measuring import Referee, compare
from benchmarks.reporting import Row, ratio_row
from benchmarks.short import DIM, HEADS

SIZES, ROUNDS = (1024, 4096), 10
TITLE = f"weights that are stored, {HEADS} heads of {DIM}, float32"
TITLE_ZH = f"存下权重的注意力，{HEADS} 个头，每头宽 {DIM}，float32"
FASTER = 2.0  # what is said of tiled attention: two to four times


class Case(short.Case):
    """Attention that stores all weights in one tensor, as the other side."""

    def theirs(self) -> list[Tensor]:
        """Run the other side."""
        query, key, value = self.tensors
        scores = query @ key.mT * query.shape[-1] ** -0.5
        if self.causal:
            n = query.shape[2]
            scores = scores.masked_fill_(torch.ones(n, n, dtype=torch.bool).triu_(1), float("-inf"))
        return self._results(scores.softmax(-1) @ value)


def measure(referee: Referee) -> Iterator[Row]:
    """Measure this question and return its rows."""
    for n, causal, trains in itertools.product(SIZES, (False, True), (False, True)):
        its = Case(*short.case(n, causal, trains))
        short.check(its)
        pair = compare(its.ours, its.theirs, rounds=ROUNDS, referee=referee)
        name = f"{'causal' if causal else 'full'}, n={n}{', with backward' if trains else ''}"
        yield ratio_row(name, pair, peer="weights stored", target=FASTER)
