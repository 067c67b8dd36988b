"""The claim that attention with bounded entries is cheap to approximate, by polynomials instead of the exponential."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from saccade.support.language import Message
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, at_least, at_most


def monomials(x: Tensor, degree: int) -> Tensor:
    """Return features with the Taylor polynomial of exp(q·k) as dot products, ``[n, C(d + degree, degree)]``."""
    columns = []
    for total in range(degree + 1):
        for chosen in itertools.combinations_with_replacement(range(x.shape[-1]), total):
            repeats = math.prod(math.factorial(chosen.count(channel)) for channel in set(chosen))
            columns.append(x[:, list(chosen)].prod(-1) / repeats**0.5)
    return torch.stack(columns, -1)


def by_features(query: Tensor, key: Tensor, value: Tensor, degree: int) -> Tensor:
    """Compute attention with scale 1 from polynomial features, in time linear in the number of keys."""
    of_query, of_key = monomials(query, degree), monomials(key, degree)
    return (of_query @ (of_key.T @ value)) / (of_query @ of_key.sum(0))[:, None]


def smallest_rank(matrix: Tensor, error: float = 0.1) -> int:
    """Return the smallest rank with which a matrix can be approximated up to a relative error of ``error``.

    Norms are Frobenius norms. By the Eckart-Young theorem, a smaller number of features cannot achieve this error.
    """
    energy = torch.linalg.svdvals(matrix).square()
    left = energy.sum() - energy.cumsum(0)
    return int((left > error**2 * energy.sum()).sum()) + 1


@claim(
    "features",
    latex=r"|Q_{ij}|,|K_{ij}|\le B=o(\sqrt{\log n}),\ d=O(\log n)\ \Rightarrow\ n^{1+o(1)}",
    source="Alman and Song 2023, arXiv:2302.13214, theorems 1.3 and 1.4",
    verdict="holds if",
    conditions="entries are at most o(√log n) and the width grows as log n at most: a polynomial in place of exp then "
    "needs so few features that all products are linear in n up to a factor of n^o(1). With larger entries, features "
    "do not suffice. That no other method does is proven only under the strong exponential time hypothesis; "
    "measurements cannot show it",
)
def bounded_entries_make_attention_cheap(
    draw: Draw,
    *,
    features: Callable[[Tensor, Tensor, Tensor, int], Tensor] = by_features,
    rank: Callable[[Tensor], int] = smallest_rank,
) -> Measurements:
    """If the entries of queries and keys are bounded, attention can be approximated in nearly linear time."""
    width = 4

    def error(bound: float, n: int, degree: int) -> float:
        query, key = (bound * (2 * draw.uniform(n, width) - 1) / width**0.25 for _ in range(2))
        value = draw.normal(n, 3)
        exact = (query @ key.T).softmax(-1) @ value
        return float((features(query, key, value, degree) - exact).norm() / exact.norm())

    for n in (64, 1024):
        yield at_most(
            Message("entries within ± 1, n = {n:,}, 70 features of degree 4: relative error", n=n),
            error(1.0, n, 4),
            0.01,
        )
    yield at_least("entries within ± 4, n = 1,024: the same", error(4.0, 1024, 4), 0.5)

    def needed(bound: float, n: int) -> int:
        query, key = (bound * (2 * draw.uniform(n, 8) - 1) for _ in range(2))
        return rank((query @ key.T / 8**0.5).softmax(-1))

    few, many = (needed(1.0, n) for n in (128, 512))
    yield at_most("entries within ± 1, d = 8, n = 512: least number of features for an error of 10 %", many, 15)
    yield at_most("the same, over n = 128", many / few, 1.5)
    few, many = (needed(math.log(n) ** 0.5, n) for n in (128, 512))
    yield at_least("entries within ± √log n, d = 8, n = 512: least number of features for 10 %", many, 100)
    yield at_least("the same, over n = 128", many / few, 2.0)
