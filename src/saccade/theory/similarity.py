"""Claim that dot products measure similarity."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, differ, equal, same


def dot_products(query: Tensor, key: Tensor) -> Tensor:
    """Return the dot products of all queries and keys, ``[q_len, kv_len]``, as a measure of similarity."""
    return query @ key.T


@claim(
    latex=r"q\cdot k=\tfrac12\bigl(|q|^2+|k|^2-|q-k|^2\bigr)",
    source="tutorials; against it, for keys of several lengths, Ram and Gray 2012, on search by inner products",
    verdict="holds if",
    conditions="all keys have the same length: then the nearest key has the largest product, of unit "
    "vectors the cosine. Otherwise long keys win. With W_q and W_k the score is not even symmetric: it measures what "
    "the query seeks, which need not be similar to it",
)
def dot_products_show_similarity(
    draw: Draw, *, score: Callable[[Tensor, Tensor], Tensor] = dot_products
) -> Measurements:
    """The dot product is a good measure of how similar two vectors are."""
    n, width = 512, 8
    x, y = draw.normal(n, width), draw.normal(n, width)
    unit, other = (torch.nn.functional.normalize(one, dim=-1) for one in (x, y))
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
