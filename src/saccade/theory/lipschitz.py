"""The claim that self-attention is Lipschitz, tested by the norm of its Jacobian."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.matrix import attention
from saccade.scores import Gaussian
from saccade.support.language import Message
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, at_most, equal


def self_attention(x: Tensor) -> Tensor:
    """Compute self-attention with tokens ``[n, d]`` as queries, keys and values."""
    return attention(*[x[None, None]] * 3)[0, 0]


def by_distances(x: Tensor) -> Tensor:
    """Compute self-attention of tokens ``[n, d]`` with negative squared distances divided by 2√d as scores."""
    score = Gaussian(x.shape[-1] ** 0.25).to(x)
    return attention(*[x[None, None]] * 3, score=score)[0, 0]


def norm_of_jacobian(layer: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return the spectral norm of the Jacobian of a layer at tokens ``[n, d]``."""
    jacobian = torch.autograd.functional.jacobian(layer, x).reshape(x.numel(), x.numel())
    return float(torch.linalg.matrix_norm(jacobian, 2))


@claim(
    "gradients",
    latex=r"\lVert f(X)-f(Y)\rVert\le L\,\lVert X-Y\rVert",
    source="against it Kim et al. 2021, arXiv:2006.04710, theorem 3.1; for distances its theorem 3.2",
    verdict="refuted",
    conditions="softmax is Lipschitz, self-attention is not: the Jacobian grows with the square of the tokens' length "
    "r. Tokens of bounded length have a bound, √n (1 + 2r²/√d) + r²/√d for W_q = W_k = W_v = I; and attention by "
    "squared distances, with one map for queries and keys, has one for all tokens",
)
def self_attention_is_lipschitz(
    draw: Draw,
    *,
    layer: Callable[[Tensor], Tensor] = self_attention,
    bounded: Callable[[Tensor], Tensor] = by_distances,
) -> Measurements:
    """Self-attention is Lipschitz: the change in its output is at most a fixed multiple of the change in its input."""
    n, width = 8, 4
    unit = torch.nn.functional.normalize(draw.normal(n, width), dim=-1)
    with_zero = unit * (torch.arange(n) > 0)[:, None]  # the query of a token of zeros weighs all keys alike
    norms = {r: norm_of_jacobian(layer, r * with_zero) for r in (16, 32, 64)}
    for r in (32, 64):
        growth = norms[r] / norms[r // 2]
        yield equal(
            Message("norm of the Jacobian, tokens of length {r}, over length {half}", r=r, half=r // 2),
            growth,
            4.0,
            30 / r**2,
            "the law r²",
        )
        yield apart("the same", growth, 1.0, 2.5)
    ratios = [
        norm_of_jacobian(layer, r * unit) / (n**0.5 * (1 + 2 * r**2 / width**0.5) + r**2 / width**0.5)
        for r in (0.5, 1, 2, 4)
    ]
    yield at_most("tokens of length 0.5 to 4: norm, over √n (1 + 2r²/√d) + r²/√d", max(ratios), 1.0)
    largest = max(norm_of_jacobian(bounded, r * tokens) for r in (1, 4, 16, 64) for tokens in (unit, with_zero))
    yield at_most("scores by squared distances, tokens of length 1 to 64: largest norm", largest, 3.0)
