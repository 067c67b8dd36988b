"""The claim that softmax can put most weight on one of many keys, tested with a retrieval layer trained on few keys."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from saccade.support.language import Message
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, at_least, at_most, equal
from saccade.theory.softmax import softmax

_TRAINED_ON = 16


def largest_possible(num_keys: int, largest: float) -> float:
    """Return the largest weight that softmax can give one of ``num_keys`` keys, with scores between ± ``largest``."""
    return 1 / (1 + (num_keys - 1) * math.exp(-2 * largest))


def logarithmic(num_keys: int) -> float:
    """Return the factor ln n / ln 16 for the scores of a layer that was trained on 16 keys."""
    return math.log(num_keys) / math.log(_TRAINED_ON)


def retrieval_weights(lengths: tuple[int, ...], factor: Callable[[int], float], seeds: int = 4) -> list[Tensor]:
    """Train a layer to find one of 16 random unit keys, and return the weights that it gives to the correct key.

    The score is bilinear, q·Wk, and W is trained by 200 steps of Adam, for several seeds at once.

    Args:
        lengths: numbers of keys to test with.
        factor: the factor for the scores during the test, as a function of the number of keys.
        seeds: number of training runs.

    Returns:
        For each length, the weights of the correct key in 256 tests, ``[seeds, 256]``.
    """
    width, generator = 16, Generator().manual_seed(0)

    def weights(of_scores: Tensor, examples: int, keys: int, factor: float) -> Tensor:
        key = torch.nn.functional.normalize(torch.randn(examples, keys, width, generator=generator), dim=-1)
        scores = torch.einsum("mc,scd,mnd->smn", key[:, 0], of_scores, key)  # the query equals the first key
        return softmax(factor * scores)[..., 0]

    of_scores = (0.1 * torch.randn(seeds, width, width, generator=generator)).requires_grad_()
    optimizer = torch.optim.Adam([of_scores], 0.05)
    for _ in range(200):
        loss = -weights(of_scores, 64, _TRAINED_ON, 1.0).log().mean(-1).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return [weights(of_scores, 256, n, factor(n)).double() for n in lengths]


@claim(
    "softmax",
    latex=r"|s_j|\le c\ \Rightarrow\ \max_j p_j\le\frac{1}{1+(n-1)e^{-2c}}",
    source="Veličković et al. 2024, arXiv:2410.01104; for the factor Chiang and Cholak 2022, arXiv:2202.12172",
    verdict="holds if",
    conditions="the scores grow with ln n: with bounded scores, every weight vanishes as n grows, and tokens of equal "
    "length with fixed weights have bounded scores. A layer trained to find one of 16 keys gives it 0.9 of the "
    "weight, and 0.12 among 1,024 keys; with its scores multiplied by ln n / ln 16 it is as sharp as before",
)
def softmax_stays_sharp(
    draw: Draw,
    *,
    softmax: Callable[[Tensor], Tensor] = softmax,
    bound: Callable[[int, float], float] = largest_possible,
    factor: Callable[[int], float] = logarithmic,
    unchanged: Callable[[int], float] = lambda num_keys: 1.0,
) -> Measurements:
    """Softmax can put nearly all weight on one key, however many keys there are."""
    for n in (16, 1024):
        scores = 4 * draw.uniform(500, n) - 2
        yield at_most(
            Message("n = {n:,}, 500 rows of scores within ± 2: largest weight", n=n),
            float(softmax(scores).max()),
            bound(n, 2.0),
        )
        scores = torch.full((n,), -2.0, dtype=torch.float64)
        scores[0] = 2.0
        yield equal(
            Message("n = {n:,}, one score of 2, the others -2: largest weight", n=n),
            float(softmax(scores)[0]),
            bound(n, 2.0),
        )
        scores *= logarithmic(n)
        yield at_least("the same, scores times ln n / ln 16: largest weight", float(softmax(scores)[0]), 0.75)
    few, many = retrieval_weights((16, 1024), unchanged)
    yield at_least(
        "layer trained on 16 keys, 16 keys: weight of the right one, worst of 4 seeds", float(few.mean(-1).min()), 0.85
    )
    yield at_most("the same, 1,024 keys: best of 4 seeds", float(many.mean(-1).max()), 0.2)
    (scaled,) = retrieval_weights((1024,), factor)
    yield at_least("1,024 keys, scores times ln n / ln 16: worst of 4 seeds", float(scaled.mean(-1).min()), 0.85)
