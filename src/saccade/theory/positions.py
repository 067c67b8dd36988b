"""Claims about positions: what a causal mask alone conveys, and how rotary scores vary with distance."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.masks import Causal, Mask
from saccade.matrix import AttentionMatrix, attention
from saccade.positions import Rotary
from saccade.support.language import Message
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, at_most, differ, equal, estimate, same


def share_of_the_first(n: int, mask: Mask | None) -> Tensor:
    """Return the weight that each position gives the first token, ``[n]``, if all scores are 0."""
    zeros = torch.zeros(1, 1, n, 1, dtype=torch.float64)
    return AttentionMatrix(zeros, zeros, mask).to_dense()[0, 0, :, 0]


def stack(tokens: Tensor, maps: list[list[Tensor]], mask: Mask | None) -> Tensor:
    """Return tokens ``[n, d]`` after layers of self-attention with skip connections and without positions.

    Each layer has three ``maps``, for queries, keys and values.
    """
    for layer in maps:
        query, key, value = (tokens[None, None] @ weight for weight in layer)
        tokens = tokens + attention(query, key, value, mask)[0, 0]
    return tokens


@claim(
    "symmetry",
    latex=r"\text{scores }0:\quad A_{i1}=1/i",
    source="Haviv et al. 2022, arXiv:2203.16634; Kazemnejad et al. 2023, arXiv:2305.19466, theorem 1",
    verdict="holds if",
    conditions="the first token differs from the others and the mask is causal: a head with equal scores then gives "
    "it the weight 1/i, from which i can be read. Equal tokens stay equal at all positions through any number of "
    "layers; without the mask positions are unknown; and one layer does not reveal the order of earlier tokens, but "
    "two do",
)
def a_causal_mask_tells_positions(
    draw: Draw,
    *,
    share: Callable[[int, Mask | None], Tensor] = share_of_the_first,
    stack: Callable[[Tensor, list[list[Tensor]], Mask | None], Tensor] = stack,
) -> Measurements:
    """A causal mask alone conveys positions: a decoder needs no position encoding (NoPE)."""
    n, width = 512, 8
    positions = torch.arange(1, n + 1, dtype=torch.float64)
    seen = share(n, Causal())
    yield same("causal, scores of 0: weight of the first token at position i, against 1/i", seen, 1 / positions)
    yield equal(
        "the same: share of positions that rounding its inverse gives",
        float(((1 / seen).round() == positions).double().mean()),
        1.0,
    )
    maps = [[draw.normal(width, width) / width**0.5 for _ in range(3)] for _ in range(3)]
    alike = draw.normal(1, width).expand(32, width)
    out = stack(alike, maps, Causal())
    yield same("causal, equal tokens: outputs of three layers, against the first", out, out[:1].expand_as(out))
    tokens = draw.normal(32, width)
    order = torch.cat([draw.permutation(31), torch.tensor([31])])
    for name, layers, mask in (("no mask, three layers", 3, None), ("causal, one layer", 1, Causal())):
        last, shuffled = (stack(sequence, maps[:layers], mask)[-1] for sequence in (tokens, tokens[order]))
        yield same(
            Message("{name}: last output after shuffling the tokens before it", name=Message(name)), shuffled, last
        )
    last, shuffled = (stack(sequence, maps[:2], Causal())[-1] for sequence in (tokens, tokens[order]))
    yield differ("causal, two layers: the same", shuffled, last, 0.04)


Scores = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function that returns the products of queries with keys at distances before them, ``[queries, distances]``."""


def rotary_products(query: Tensor, key: Tensor, distances: Tensor) -> Tensor:
    """Return products of rotated queries with rotated keys at given distances before them, ``[queries, distances]``."""
    rotary, last = Rotary(query.shape[-1]), int(distances.max())
    query = rotary(query[None, :, None], torch.tensor([last]))  # [1, queries, 1, d]
    key = rotary(key[None, :, None].expand(-1, -1, len(distances), -1), last - distances)
    return (query * key).sum(-1)[0]


def bound_of_su(width: int, n: int) -> Tensor:
    """Return the factor mean |S_j| in Su et al.'s upper bound on rotary products, for distances 0 to ``n - 1``.

    For distance m, S_j is the sum of exp(i m θ) over the first j frequencies θ.
    """
    frequencies = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    turned = torch.polar(torch.ones(n, width // 2, dtype=torch.float64), torch.arange(n)[:, None] * frequencies)
    return turned.cumsum(-1).abs().mean(-1)


@claim(
    "symmetry",
    latex=r"q^\top R_{m}k\to 0\ \text{as}\ m\ \text{grows}",
    source="Su et al. 2021, arXiv:2104.09864, section 3.4.3; against it Barbero et al. 2024, arXiv:2410.06205, "
    "proposition 3.1",
    verdict="refuted",
    conditions="an upper bound falls with distance, and so does the product of a query with an equal key. But for "
    "each distance there is a key whose product is largest there, and for random queries and keys the products are as "
    "large at any distance",
)
def rotary_scores_fall_with_distance(
    draw: Draw, *, scores: Scores = rotary_products, bound: Callable[[int, int], Tensor] = bound_of_su
) -> Measurements:
    """With rotary positions, scores fall with distance."""
    width, n, far = 64, 512, 200
    factor = bound(width, n)
    yield at_most(
        "factor of the upper bound, distances 256 to 511, over distance 0", float(factor[256:].max() / factor[0]), 0.5
    )
    ones = torch.ones(1, width, dtype=torch.float64)
    alike = scores(ones, ones, torch.arange(n))[0]
    yield at_most(
        "query and key of ones: product at distances 256 to 511, over distance 0",
        float(alike[256:].max() / alike[0]),
        0.6,
    )
    query = draw.normal(1, width)
    key = Rotary(width)(query[None, None], torch.tensor([far]))[0, 0]  # R_200 q: the rotation by 200 undoes it
    product = scores(query, key, torch.arange(n))[0]
    yield equal(
        "a key made for distance 200: product there, over |q|²", float(product[far] / query.square().sum()), 1.0
    )
    yield apart("the same: distance of the largest product", int(product.argmax()), 0, 100)
    distances = torch.tensor([0, 64, 511])
    squares = scores(draw.normal(20_000, width), draw.normal(20_000, width), distances).square()
    for one, distance in zip(squares.unbind(-1), distances.tolist(), strict=True):
        yield estimate(
            Message("random queries and keys, distance {distance}: mean square of the product", distance=distance),
            one,
            width,
        )
