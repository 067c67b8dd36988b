"""Claims about similarity: dot products as its measure, and projections that align two codes of the same symbols."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, at_least, at_most, differ, equal, same
from saccade.theory.rank import weights_of


def dot_products(query: Tensor, key: Tensor) -> Tensor:
    """Return the dot products of all queries and keys, ``[q_len, kv_len]``, as a measure of similarity."""
    return query @ key.T


def weights_as_printed(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """Return the weights of a tutorial's attention layer, ``[batch, 1, n]``.

    The layer multiplies keys ``[batch, n, width]`` by a matrix and by the query ``[batch, 1, width]``, without a scale.
    Unlike in the tutorial, the weights are transposed, so that they can be multiplied by the values.
    """
    return (key @ weight.T).bmm(query.transpose(1, 2)).softmax(1).transpose(1, 2)


@claim(
    latex=r"q\cdot k=\tfrac12\bigl(|q|^2+|k|^2-|q-k|^2\bigr)",
    source="tutorials; against it, for keys of several lengths, Ram and Gray 2012, on search by inner products",
    verdict="holds if",
    conditions="all keys have the same length: then the nearest key has the largest product, which is the cosine for "
    "unit vectors. Otherwise, long keys win. Between tokens, W_q W_kᵀ must also be a positive multiple of the "
    "identity: otherwise the score is not even symmetric, and with W_k = -W_q the most similar token gets the lowest "
    "score. The score measures what the query seeks, which need not be similar to the query",
)
def dot_products_show_similarity(
    draw: Draw,
    *,
    score: Callable[[Tensor, Tensor], Tensor] = dot_products,
    printed: Callable[[Tensor, Tensor, Tensor], Tensor] = weights_as_printed,
) -> Measurements:
    """The dot product is a good measure of how similar two vectors are."""
    n, width = 512, 8
    x, y = draw.normal(n, width), draw.normal(n, width)
    unit, other = (torch.nn.functional.normalize(vectors, dim=-1) for vectors in (x, y))
    distances = torch.cdist(unit, other)
    yield same("unit vectors, against 1 - |q - k|²/2", score(unit, other), 1 - distances.square() / 2, 1e-7)
    nearest = score(unit, other).argmax(-1) == distances.argmin(-1)
    yield equal("unit vectors: share of queries whose best key is the nearest", float(nearest.double().mean()), 1.0)
    strangers = score(x, x).argmax(-1) != torch.arange(n)
    yield apart(
        "normal vectors: share that score another higher than themselves", float(strangers.double().mean()), 0, 0.1
    )
    axis = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    at_60_degrees = torch.tensor([[1.5, 1.5 * 3**0.5]], dtype=torch.float64)
    gain = float(score(axis, at_60_degrees) / score(axis, axis))
    yield equal("a key at 60° and three times as long, over the query itself", gain, 1.5)
    of_queries, of_keys = (draw.normal(width, width) / width**0.5 for _ in range(2))
    learned = score(unit @ of_queries, unit @ of_keys)
    yield differ("with W_q and W_k: i for j and j for i", learned, learned.T, 0.5)
    rotation = torch.linalg.qr(draw.normal(width, width)).Q
    turned = score(unit @ rotation, -unit @ rotation)
    lowest = turned.argmin(-1) == torch.arange(n)
    yield equal(
        "unit tokens, W_k = -W_q: share that give themselves the lowest score", float(lowest.double().mean()), 1.0
    )
    query, keys, weight = draw.normal(2, 1, 4), draw.normal(2, 5, 4), draw.normal(4, 4)
    expected = torch.stack([score(q, k @ weight.T).softmax(-1) for q, k in zip(query, keys, strict=True)])
    yield same(
        "printed layer: weights, against dot products with projected keys", printed(query, keys, weight), expected
    )


def pseudoinverses(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pseudoinverses of two codes, ``[symbols, width]`` each, which map equal symbols to the same axis."""
    return torch.linalg.pinv(first), torch.linalg.pinv(second)


@claim(
    latex=r"W_Q=X^+,\ W_K=Y^+\ \Rightarrow\ (XW_Q)(YW_K)^\top=I",
    source="tutorials; Radford et al. 2021, arXiv:2103.00020, train such maps for texts and images, without attention",
    verdict="holds if",
    conditions="the projections map both codes to one space, which training has to find: here they are the "
    "pseudoinverses of the codes. Random projections align nothing. Whether trained models align texts with images is "
    "not measured",
)
def cross_attention_aligns_codes(
    draw: Draw,
    *,
    maps: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = pseudoinverses,
    weights: Callable[[Tensor, Tensor], Tensor] = weights_of,
) -> Measurements:
    """Cross-attention aligns two modalities: each token of one finds its counterpart in the other."""
    symbols, width = 12, 16
    first, second = draw.normal(symbols, width), draw.normal(symbols, width)  # two codes of the same symbols
    order = draw.permutation(symbols)

    def on_partner(of_query: Tensor, of_key: Tensor) -> Tensor:
        of_pairs = weights(first @ of_query, second[order] @ of_key * 100)
        return of_pairs.gather(1, order.argsort()[:, None])

    yield at_least(
        "maps to one space: smallest weight of the counterpart", float(on_partner(*maps(first, second)).min()), 0.99
    )
    lottery = on_partner(draw.normal(width, symbols), draw.normal(width, symbols))
    yield at_most("random maps: mean weight of the counterpart", float(lottery.mean()), 0.5)
