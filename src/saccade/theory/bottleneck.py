"""The information bottleneck of a small problem, where both of its terms can be counted."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import Tensor

from saccade.matrix import attention
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, equal

_BETA = 2.0
_INPUTS = tuple(itertools.product((0, 1), repeat=3))  # three fair coins; the target is the first


def bits(outcomes: Sequence[Hashable]) -> float:
    """Return the entropy in bits of a list of equally probable outcomes."""
    return sum(-count / len(outcomes) * math.log2(count / len(outcomes)) for count in Counter(outcomes).values())


def kept_and_told(outcomes: Sequence[Hashable], targets: Sequence[Hashable]) -> tuple[float, float]:
    """Return I(X; Z) and I(Z; Y) in bits, for Z = f(X) and equally probable inputs X."""
    both = list(zip(outcomes, targets, strict=True))
    return bits(outcomes), bits(outcomes) + bits(targets) - bits(both)


def _maps(n: int) -> Iterator[tuple[int, ...]]:
    """Yield every partition of n inputs: for each input the number of its class."""
    classes: list[tuple[int, ...]] = [()]
    for _ in range(n):
        classes = [(*one, own) for one in classes for own in range(max(one, default=-1) + 2)]
    return iter(classes)


@claim(
    "information",
    latex=r"\min\ I(X;Z)-\beta I(Z;Y)",
    source='tutorials; the principle: Tishby et al. 1999, arXiv:physics/0004057; for networks Saxe et al. 2018, "On '
    'the information bottleneck theory of deep learning"',
    verdict="refuted",
    conditions="softmax weights are above 0, so in general the output still distinguishes all inputs: the first term "
    "is at its maximum, and no part of attention reduces it. Weights of exactly 0, or noise, discard information; "
    "training for the target affects only the second term",
)
def attention_is_an_information_bottleneck(
    draw: Draw,
    *,
    attend: Callable[..., Tensor] = attention,
    terms: Callable[[Sequence[Hashable], Sequence[Hashable]], tuple[float, float]] = kept_and_told,
) -> Measurements:
    """Attention retains information about the target and discards the rest: an information bottleneck."""
    coins, targets = torch.tensor(_INPUTS, dtype=torch.float64), [first for first, *_ in _INPUTS]
    tags = torch.eye(3, dtype=torch.float64).expand(8, 1, 3, 3)

    def measured(scores: Tensor) -> tuple[float, float]:
        out = attend(scores.expand(8, 1, 1, 3), tags, coins[:, None, :, None], scale=1.0)
        return terms([round(one, 9) for one in out.flatten().tolist()], targets)

    soft = measured(draw.normal(3) + torch.tensor([2.0, 0.0, 0.0]))
    hard = measured(torch.tensor([1e3, 0.0, 0.0], dtype=torch.float64))
    even = measured(torch.zeros(3, dtype=torch.float64))
    yield apart("three coins, the first is wanted: bits of the input kept; a bottleneck keeps 1", soft[0], 1.0, 1.5)
    yield equal("the same: bits about the target", soft[1], 1.0)
    yield equal("weights of exactly 1, 0, 0: bits kept", hard[0], 1.0)
    yield equal("the same: bits about the target", hard[1], 1.0)
    yield equal("equal weights, by hand: bits kept", even[0], 3 - 0.75 * math.log2(3))
    yield equal("the same: bits about the target", even[1], 1.5 - 0.75 * math.log2(3))
    told = [terms(one, targets) for one in _maps(8)]
    least = min(kept - _BETA * about for kept, about in told)
    yield equal(f"least I(X; Z) - 2 I(Z; Y) of all {len(told):,} maps", least, 1 - _BETA)
    yield apart("the same of softmax weights", soft[0] - _BETA * soft[1], least, 1.5)
