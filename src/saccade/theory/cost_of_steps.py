"""Claim about the three steps of attention: the cost of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from saccade.theory.claim import Draw, claim
from saccade.theory.complexity import flops
from saccade.theory.measurement import Measurements, equal


def written(compute: Callable[[], object]) -> int:
    """Count the numbers that the operations of a computation write to memory."""
    with _WriteCounter() as counter:
        compute()
    return counter.numbers


class _WriteCounter(TorchDispatchMode):
    """A torch dispatch mode that counts the numbers that operations write to memory."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operation(*args, **(kwargs or {}))
        self.numbers += out.numel()
        return out


def products_of_all(query: Tensor, key: Tensor) -> Tensor:
    """Return the scores QKᵀ, the first step of attention."""
    return query @ key.mT


def normalised(scores: Tensor) -> Tensor:
    """Return the softmax of the scores, the second step of attention, computed in five elementary operations."""
    raised = (scores - scores.amax(-1, keepdim=True)).exp()
    return raised / raised.sum(-1, keepdim=True)


def sums_of_values(weights: Tensor, value: Tensor) -> Tensor:
    """Return the weighted sums AV, the third step of attention."""
    return weights @ value


@claim(
    "complexity",
    latex=r"QK^\top:\ 2n^2d_k,\quad\mathrm{softmax}:\ O(n^2),\quad AV:\ 2n^2d_v",
    source="tables of tutorials; Vaswani et al. 2017, arXiv:1706.03762, table 1, for the total",
    verdict="holds",
    conditions="a multiplication and an addition count as two operations; softmax writes 3 n² + 2 n numbers "
    "whatever the width is. `A.explain()` reports all three for any mask",
)
def each_step_costs_n_squared(
    draw: Draw,
    *,
    scores: Callable[[Tensor, Tensor], Tensor] = products_of_all,
    softmax: Callable[[Tensor], Tensor] = normalised,
    sums: Callable[[Tensor, Tensor], Tensor] = sums_of_values,
) -> Measurements:
    """The scores QKᵀ take O(n² d_k) operations, softmax O(n²), and the weighted sums AV O(n² d_v)."""

    def shapes(n: int, width: int) -> tuple[Tensor, Tensor]:
        return torch.empty(n, width, device="meta"), torch.empty(n, n, device="meta")

    def of_scores(n: int, width: int) -> int:
        x = shapes(n, width)[0]
        return flops(lambda: scores(x, x))

    def of_softmax(n: int) -> int:
        square = shapes(n, 1)[1]
        return written(lambda: softmax(square))

    def of_sums(n: int, width: int) -> int:
        x, square = shapes(n, width)
        return flops(lambda: sums(square, x))

    n, width = 512, 32
    yield equal("QKᵀ: operations, n = 512, d_k = 32, against 2 n² d_k", of_scores(n, width), 2 * n**2 * width)
    yield equal("QKᵀ: growth for twice n", of_scores(2 * n, width) / of_scores(n, width), 4.0)
    yield equal("QKᵀ: growth for twice d_k", of_scores(n, 2 * width) / of_scores(n, width), 2.0)
    yield equal("softmax: numbers written, n = 512, against 3 n² + 2 n", of_softmax(n), 3 * n**2 + 2 * n)
    yield equal("softmax: growth for twice n", of_softmax(2 * n) / of_softmax(n), 4.0, 0.01, "2 n of them")
    yield equal("AV: operations, n = 512, d_v = 32, against 2 n² d_v", of_sums(n, width), 2 * n**2 * width)
    yield equal("AV: growth for twice n", of_sums(2 * n, width) / of_sums(n, width), 4.0)
    yield equal("AV: growth for twice d_v", of_sums(n, 2 * width) / of_sums(n, width), 2.0)
