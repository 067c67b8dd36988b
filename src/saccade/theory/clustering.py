"""The claim that tokens on the sphere gather in clusters under many layers of attention with skip connections."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

from saccade.matrix import attention
from saccade.support.language import Message
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, at_least, at_most


def flow(tokens: Tensor, layers: int, sharpness: float, sign: float = 1.0, step: float = 0.1) -> Tensor:
    """Run tokens of norm 1, ``[n, d]``, through layers of attention with skip connections; each layer normalises them.

    Args:
        tokens: the tokens, which are queries, keys and values.
        layers: number of layers.
        sharpness: the factor for the scores, β.
        sign: the factor for the values, 1 or -1.
        step: the factor for the output of each layer, which is added to the tokens.
    """
    x = tokens[None, None]
    for _ in range(layers):
        x = normalize(x + step * sign * attention(x, x, x, scale=sharpness), dim=-1)
    return x[0, 0]


def clusters(tokens: Tensor, least: float = 0.99) -> Tensor:
    """Return which tokens of norm 1 are linked by a chain of inner products above ``least``, bool ``[n, n]``."""
    joined = (tokens @ tokens.T > least).double()
    for _ in range(len(tokens).bit_length()):  # each squaring doubles the length of the chains
        joined = (joined @ joined > 0).double()
    return joined > 0


@claim(
    "rank",
    latex=r"\dot x_i=P_{x_i}\Bigl(\sum_j A_{ij}x_j\Bigr),\quad|x_i|=1:\quad\text{clusters}",
    source="Geshkovski et al. 2023, arXiv:2312.10794; for several clusters that last Geshkovski et al. 2024, "
    "arXiv:2410.06833",
    verdict="holds if",
    conditions="tokens are normalised after each layer and the values attract (W_v = I). With small β all tokens "
    "become one; with large β they soon form several clusters, which last for a number of layers that grows with β. "
    "Values that repel (W_v = -I) keep them apart",
)
def tokens_cluster(
    draw: Draw,
    *,
    flow: Callable[..., Tensor] = flow,
    clusters: Callable[[Tensor], Tensor] = clusters,
    sign: float = -1.0,
) -> Measurements:
    """Under repeated attention, tokens gather in a few clusters, despite skip connections."""
    n = 32

    def count(tokens: Tensor) -> int:
        return len(clusters(tokens).unique(dim=0))

    spread = normalize(draw.normal(n, 8), dim=-1)
    once = flow(spread, 200, 1.0)
    yield at_least("β = 1, d = 8: smallest inner product after 200 layers", float((once @ once.T).min()), 0.999)
    circle = normalize(draw.normal(n, 2), dim=-1)
    yield at_least("on a circle, before: clusters of 32 tokens", count(circle), 10)
    early = flow(circle, 200, 50.0)
    late = flow(early, 400, 50.0)
    for layers, tokens in ((200, early), (600, late)):
        yield at_most(Message("β = 50, on a circle: clusters after {layers} layers", layers=layers), count(tokens), 12)
        yield at_least("the same", count(tokens), 3)
    distance = torch.where(clusters(late), 1 - late @ late.T, 0.0).max()
    yield at_most("the same: largest distance within a cluster, 1 - cosine", float(distance), 1e-3)
    apart = flow(spread, 200, 1.0, sign)
    yield at_most(
        "β = 1, d = 8, W_v = -I: smallest inner product after 200 layers", float((apart @ apart.T).min()), -0.5
    )
