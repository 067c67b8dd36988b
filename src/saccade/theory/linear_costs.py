"""Costs of Linformer and Performer, counted in the operations of the mechanisms here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.mechanisms import Linformer, Performer
from saccade.mechanisms.linformer import LinformerMatrix
from saccade.theory.claim import Draw, claim
from saccade.theory.complexity import dense, flops, growth
from saccade.theory.measurement import Measurements, apart, at_most, equal


def _tokens(length: int, width: int) -> Tensor:
    return torch.zeros(1, 1, length, width)


def operations_of_linformer(length: int, rank: int, width: int) -> int:
    """Count the operations of one head with this many slots, computed densely: counters do not see fused kernels."""
    x = _tokens(length, width)
    mechanism = Linformer(length, rank)

    def product() -> Tensor:
        matrix = mechanism(x, x)
        assert isinstance(matrix, LinformerMatrix)
        return matrix.slots() @ (matrix.projection @ x)

    return flops(product)


def operations_of_performer(length: int, features: int, width: int) -> int:
    """Count the operations of one head with this many random features."""
    x = _tokens(length, width)
    made = Performer(features)
    made(x, x) @ x  # draws the directions
    return flops(lambda: made(x, x) @ x)


def _exact(length: int, width: int) -> int:
    x = _tokens(length, width)
    return flops(lambda: dense(x, x, x))


@claim(
    "complexity",
    latex=r"O(nk)",
    source="Wang et al. 2020, arXiv:2006.04768, section 4",
    verdict="holds",
    conditions="the width is left out of O(nk), as it usually is: for d_k = d_v = d it is 8 n k d, against 4 n² d, so "
    "fewer than n/2 slots must do. How many do is another question",
)
def linformer_costs_n_k(draw: Draw, *, count: Callable[[int, int, int], int] = operations_of_linformer) -> Measurements:
    """A Linformer with k slots takes O(n k) operations."""
    yield equal("operations, n = 256, k = 32, d = 16, against 8 n k d", count(256, 32, 16), 8 * 256 * 32 * 16)
    yield equal("growth for twice the length", growth(lambda n: count(n, 32, 16), 256), 2.0)
    yield equal("growth for twice the slots", growth(lambda k: count(256, k, 16), 32), 2.0)
    yield equal("growth for twice the width", growth(lambda d: count(256, 32, d), 16), 2.0)
    yield equal("k = n/2, over exact attention", count(256, 128, 16) / _exact(256, 16), 1.0)


@claim(
    "complexity",
    latex=r"O(nd)\ \text{or}\ O(nmd)",
    source="tutorials, which leave out m; with it Choromanski et al. 2021, arXiv:2009.14794, section 2.2",
    verdict="holds if",
    conditions="the number m of random features is held fixed: it takes O(n m d), more than exact attention if n is "
    "about m; and m for a given error grows with the norms (how-many-features)",
)
def performer_costs_n_d(draw: Draw, *, count: Callable[[int, int, int], int] = operations_of_performer) -> Measurements:
    """A Performer takes O(n d) operations: linear in the length."""
    yield equal("growth for twice the length", growth(lambda n: count(n, 64, 16), 512), 2.0, 0.02, "the ends")
    yield equal("growth for twice the width", growth(lambda d: count(512, 64, d), 64), 2.0, 0.1, "the denominators")
    features = growth(lambda m: count(512, m, 16), 64)
    yield apart("growth for twice the features, where O(n d) has 1", features, 1.0, 0.9)
    yield at_most("the same, against O(n m d)", features, 2.0, 0.02)
    yield apart(
        "n = m = 128, over exact attention, where O(n d) says less", count(128, 128, 16) / _exact(128, 16), 1.0, 0.5
    )
