"""Without hidden pairs, NaN and inf spread as in the definition: no row is marked, and none is left out."""

import math

import pytest
import torch
from torch import Tensor

import saccade as sc

KERNELS = pytest.mark.parametrize("impl", ["tiled", "fused", "matmul", "reference"])


def _defined(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    scores = query @ key.mT / query.shape[3] ** 0.5
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


@KERNELS
@pytest.mark.parametrize(
    "name, bad", [("query", math.nan), ("key", math.nan), ("value", math.nan), ("value", math.inf)]
)
def test_results_and_gradients_are_those_of_the_definition(name: str, bad: float, impl: str) -> None:
    tensors = {name: torch.randn(1, 2, 5, 4, dtype=torch.float64) for name in ("query", "key", "value")}
    tensors[name][0, 1, 2, 3] = bad
    found = []
    for results in (_defined, lambda *x: sc.attention_with_lse(*x, impl=impl)):
        leaves = [x.clone().requires_grad_() for x in tensors.values()]
        out, lse = results(*leaves)
        gradients = torch.autograd.grad((out, lse), leaves, (torch.ones_like(out).tril(), torch.ones_like(lse)))
        found.append((out.detach(), lse.detach(), *gradients))
        found[-1] += (results(*tensors.values())[0],)
    torch.testing.assert_close(found[1], found[0], equal_nan=True)
