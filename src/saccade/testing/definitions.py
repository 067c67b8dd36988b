"""Reference definitions of scores and relative biases, as in their papers, dense and in float64.

This module uses only the parameters of the library's modules and calls none of their functions. The library
computes scores as dot products of transformed queries and keys, and looks up relative biases in a table by distance.
This module evaluates the formulas for every pair instead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.positions import T5, ALiBi, Bias, Clipped, GridTable, ShawKeys
from saccade.scores import Additive, Bilinear, Cosine, Dot, Gaussian, Modified, Score
from saccade.support.errors import type_error


def compare(score: Score, query: Tensor, key: Tensor) -> Tensor:
    """Compute the unscaled score of every pair of query and key, using the score's reference definition.

    Args:
        score: a score of `saccade.scores`.
        query: ``[batch, heads, q_len, query_dim]``.
        key: ``[batch, heads, kv_len, key_dim]``, with shared keys repeated for every head.

    Returns:
        ``[batch, heads, q_len, kv_len]`` in float64.

    Raises:
        TypeError: this module has no definition of the score.
    """
    if isinstance(score, Modified):
        return compare(score.score, query, key)
    q, k = query.double()[:, :, :, None], key.double()[:, :, None]
    return _formula(_SCORES, score, "score")(score, q, k)


def default_scale(score: Score | None, head_dim: int) -> float:
    """Return the default scale of a score, according to its reference definition."""
    if isinstance(score, Modified):
        return default_scale(score.score, head_dim)
    plain = score is not None and not (isinstance(score, Dot) and score.scaled)
    return 1.0 if plain or head_dim == 0 else head_dim**-0.5


def modified(score: Score, scores: Tensor, q_positions: Tensor, kv_positions: Tensor) -> Tensor:
    """Apply the function of a `Modified` score to scaled and capped scores, using the function's reference definition.

    Args:
        score: any score; scores of other classes than `Modified` leave ``scores`` unchanged.
        scores: ``[batch, heads, q_len, kv_len]`` in float64.
        q_positions, kv_positions: int64 ``[batch | 1, q_len]`` and ``[batch | 1, kv_len]``.

    Raises:
        TypeError: this module has no definition of the function.
    """
    if not isinstance(score, Modified):
        return scores
    inner, function = modified(score.score, scores, q_positions, kv_positions), score.function
    positions = q_positions[:, None, :, None], kv_positions[:, None, None, :]
    return _formula(_FUNCTIONS, function, "function of scores")(function, inner, *positions)


def relative(bias: Bias, q_positions: Tensor, kv_positions: Tensor, query: Tensor, scale: float) -> Tensor:
    """Compute the values of a relative bias for all pairs, using the bias's reference definition.

    Args:
        bias: a relative bias of `saccade.positions`.
        q_positions, kv_positions: int64 ``[batch | 1, q_len]`` and ``[batch | 1, kv_len]``.
        query: ``[batch, heads, q_len, head_dim]``.
        scale: the scale of the scores.

    Returns:
        ``[batch | 1, heads | 1, q_len, kv_len]`` in float64.

    Raises:
        TypeError: this module has no definition of the bias.
    """
    return _formula(_BIASES, bias, "bias")(bias, q_positions[:, :, None], kv_positions[:, None], query.double(), scale)


def define(kind: type, formula: Callable[..., Tensor]) -> None:
    """Register the reference definition of a class of scores, relative biases or score functions, for use in cases.

    Args:
        kind: the class.
        formula: for a score ``(score, q [B, H, L, 1, D], k [B, H, 1, S, D]) -> [B, H, L, S]``; for a bias
            ``(bias, q [B | 1, L, 1], kv [B | 1, 1, S], query, scale) -> [B | 1, H | 1, L, S]``, where q and kv are
            positions; for a function ``(function, scores [B, H, L, S], q [B | 1, 1, L, 1], kv [B | 1, 1, 1, S])``.
            It must compute in float64 and share no code with the class.
    """
    (_SCORES if issubclass(kind, Score) else _BIASES if issubclass(kind, Bias) else _FUNCTIONS)[kind] = formula


def _formula(table: dict[type, Callable[..., Tensor]], module: object, what: str) -> Callable[..., Tensor]:
    if type(module) not in table:
        names = ", ".join(kind.__name__ for kind in table)
        raise type_error(what, f"be one of {names}", type(module).__name__)
    return table[type(module)]


# Scores: q [B, H, L, 1, D] and k [B, H, 1, S, D].


def _dot(score: Dot, q: Tensor, k: Tensor) -> Tensor:
    return (q * k).sum(-1)


def _bilinear(score: Bilinear, q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("...d, de, ...e -> ...", q, score.weight.double(), k)


def _additive(score: Additive, q: Tensor, k: Tensor) -> Tensor:
    of_q = torch.einsum("hd, ...d -> ...h", score.query_weight.double(), q)
    of_k = torch.einsum("hd, ...d -> ...h", score.key_weight.double(), k)
    return (torch.tanh(of_q + of_k) * score.output_weight.double()).sum(-1)


def _cosine(score: Cosine, q: Tensor, k: Tensor) -> Tensor:
    lengths = (q * q).sum(-1).sqrt() * (k * k).sum(-1).sqrt()
    return (q * k).sum(-1) / torch.where(lengths > 0, lengths, 1.0)


def _gaussian(score: Gaussian, q: Tensor, k: Tensor) -> Tensor:
    bandwidth = torch.exp(score.log_bandwidth.double())
    return -((q - k) ** 2).sum(-1) / (2 * bandwidth**2)


# Biases: q [B | 1, L, 1] and kv [B | 1, 1, S] are positions. Values at position -1, padding, are computed but not used.


def _alibi(bias: ALiBi, q: Tensor, kv: Tensor, query: Tensor, scale: float) -> Tensor:
    slopes = torch.tensor(_slopes(bias.num_heads), dtype=torch.float64, device=q.device)
    return -slopes[:, None, None] * (q - kv).abs()[:, None]


def _slopes(num_heads: int) -> list[float]:
    """Return ALiBi's slopes, by definition, as a geometric sequence if the number of heads is a power of two.

    Otherwise, return all slopes for the next smaller power of two, then every other slope for the next larger power
    of two.
    """
    nearest = 2 ** (len(bin(num_heads)) - 3)
    if nearest == num_heads:
        ratio = 2.0 ** (-8.0 / num_heads)
        return [ratio ** (n + 1) for n in range(num_heads)]
    return _slopes(nearest) + _slopes(2 * nearest)[0::2][: num_heads - nearest]


def _clipped(bias: Clipped, q: Tensor, kv: Tensor, query: Tensor, scale: float) -> Tensor:
    index = torch.clip(q - kv, -bias.reach, bias.reach) + bias.reach
    return bias.weight.double()[:, index].movedim(0, 1)


def _t5(bias: T5, q: Tensor, kv: Tensor, query: Tensor, scale: float) -> Tensor:
    n = bias.num_buckets // 2 if bias.bidirectional else bias.num_buckets
    distances, inverse = torch.unique(q - kv, return_inverse=True)
    buckets = []
    for distance in distances.tolist():
        after = n if distance < 0 and bias.bidirectional else 0
        buckets.append(after + _bucket(abs(distance) if bias.bidirectional else max(distance, 0), n, bias.max_distance))
    bucket = torch.tensor(buckets, dtype=torch.int64, device=q.device)
    return bias.weight.double()[bucket[inverse]].movedim(-1, 1)


def _bucket(distance: int, n: int, max_distance: int) -> int:
    """Return T5's bucket for a distance, by definition. Integer arithmetic avoids the rounding errors of logarithms."""
    single = n // 2
    if distance < single:
        return distance
    wide = n - single
    # bucket single + b begins at the distance with (distance / single) ** wide >= (max_distance / single) ** b
    reached = [distance**wide * single**b >= max_distance**b * single**wide for b in range(1, wide)]
    return single + sum(reached)


def _shaw_keys(bias: ShawKeys, q: Tensor, kv: Tensor, query: Tensor, scale: float) -> Tensor:
    of_heads = bias.weight.double() if bias.num_heads else bias.weight.double()[None]
    embeddings = of_heads[:, torch.clip(kv - q, -bias.back, bias.ahead) + bias.back].movedim(0, 1)
    return scale * (query[:, :, :, None] * embeddings).sum(-1)


def _grid_table(bias: GridTable, q: Tensor, kv: Tensor, query: Tensor, scale: float) -> Tensor:
    q, kv = q.clamp(min=0), kv.clamp(min=0)
    down = q // bias.width - kv // bias.width
    right = q % bias.width - kv % bias.width
    table = bias.weight.double().unflatten(0, (2 * bias.height - 1, 2 * bias.width - 1))
    return table[down + bias.height - 1, right + bias.width - 1].movedim(-1, 1)


_SCORES: dict[type, Callable[..., Tensor]] = {
    Dot: _dot,
    Bilinear: _bilinear,
    Additive: _additive,
    Cosine: _cosine,
    Gaussian: _gaussian,
}
_BIASES: dict[type, Callable[..., Tensor]] = {
    ALiBi: _alibi,
    Clipped: _clipped,
    T5: _t5,
    ShawKeys: _shaw_keys,
    GridTable: _grid_table,
}
_FUNCTIONS: dict[type, Callable[..., Tensor]] = {}
