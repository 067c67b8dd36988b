"""Claims about attention as an average: convex combinations, mean pooling, and the effect of dropout."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.masks import Causal, Mask, Padding
from saccade.matrix import AttentionMatrix, attention
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, at_least, at_most, equal, same

_CAUSAL = Causal()


def beyond_hull(outputs: Tensor, value: Tensor, allowed: Tensor, directions: Tensor) -> float:
    """Return how far attention outputs lie outside the convex hull of the visible values; negative if all lie inside.

    A point lies in the hull if and only if, in every direction, some corner of the hull extends at least as far.
    """
    heights = (value @ directions.T)[None].expand(len(outputs), -1, -1)
    furthest = heights.masked_fill(~allowed[:, :, None], -torch.inf).amax(1)
    return float((outputs @ directions.T - furthest).max())


def attention_with_sink(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute attention with a sink logit of 2, so that each row of weights sums to less than 1."""
    return attention(query, key, value, sink_logit=torch.full((query.shape[1],), 2.0, dtype=query.dtype))


@claim(
    latex=r"o_i\in\mathrm{conv}\{v_j: j\in V(i)\}",
    source="tutorials; rows of weights are not below 0 and sum to 1",
    verdict="holds if",
    conditions="it refers to the output of one head before the output projection, without dropout or a sink logit, "
    "and to the values of the keys that the query may attend to, of which there must be at least one",
)
def convex_combination(
    draw: Draw,
    *,
    attention: Callable[..., Tensor] = attention,
    with_sink: Callable[..., Tensor] = attention_with_sink,
) -> Measurements:
    """The output lies in the convex hull of the values."""
    n = 12
    q, k, v = (draw.normal(1, 1, n, 3) for _ in range(3))
    directions = torch.nn.functional.normalize(draw.normal(2000, 3), dim=-1)
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    full = torch.ones_like(causal)

    def reach(outputs: Tensor, allowed: Tensor) -> float:
        return beyond_hull(outputs[0, 0], v[0, 0], allowed, directions)

    yield at_most(
        "causal: reach beyond the hull of visible values", reach(attention(q, k, v, Causal()), causal), 0, 1e-12
    )
    out = attention(q, k, v)
    yield at_most("no mask: reach beyond the hull", reach(out, full), 0, 1e-12)
    yield apart("no mask: reach beyond the hull of earlier values", max(reach(out, causal), 0.0), 0.0, 0.01)
    projected = out @ (100 * torch.eye(3, dtype=torch.float64))
    away = v + 10.0  # a hull that does not contain 0, towards which a sink logit draws the output
    drawn = beyond_hull(with_sink(q, k, away)[0, 0], away[0, 0], full, directions)
    yield apart("with a sink logit: reach beyond the hull", max(drawn, 0.0), 0.0, 0.1)
    yield apart("after an output projection by 100", max(reach(projected, full), 0), 0, 0.01)


@claim(
    latex=r"\alpha_{ij}=\tfrac1m\ \Rightarrow\ o_i=\tfrac1m\sum_j v_j",
    source="tutorials",
    verdict="holds if",
    conditions="the mean is taken over the values that the query may attend to: under a causal mask it is the running "
    "mean, and padding must be masked",
)
def uniform_weights_are_mean_pooling(
    draw: Draw, *, attention: Callable[..., Tensor] = attention, mask: Mask | None = _CAUSAL
) -> Measurements:
    """With equal weights, attention is mean pooling."""
    n = 10
    k, v = draw.normal(1, 1, n, 4), draw.normal(1, 1, n, 3)
    q = torch.zeros_like(k)
    mean = v.mean(2, keepdim=True).expand_as(v)
    yield same("queries of 0: output against the mean of the values", attention(q, k, v), mean)
    running = v.cumsum(2) / torch.arange(1, n + 1)[:, None]
    yield same("causal: output against the running mean", attention(q, k, v, mask), running)
    padded = attention(q, k, v, Padding([7]))
    yield same("7 of 10 are tokens: output against their mean", padded, v[:, :, :7].mean(2, keepdim=True).expand_as(v))
    first = attention(q, k, v, mask)[0, 0, 0] - mean[0, 0, 0]
    yield apart("causal: first output against the mean of all", float(first.abs().max()), 0, 1e-3)


@claim(
    latex=r"\mathbb{E}\,\Bigl\lVert\sum_j a_jx_j-\mu\Bigr\rVert^2=\sigma^2\textstyle\sum_j a_j^2\ge\sigma^2/n",
    source="tutorials; the bound is Cauchy and Schwarz",
    verdict="holds if",
    conditions="the target depends on which tokens are present: attention finds a marked token, which the mean loses. "
    "If all tokens are noisy copies of one number, the mean is the best average, and the squared error of unequal "
    "weights is larger by a factor of n times the sum of their squares",
)
def attention_improves_on_mean_pooling(
    draw: Draw,
    *,
    attention: Callable[..., Tensor] = attention,
    pooled: Callable[[Tensor], Tensor] = lambda value: value.mean(2, keepdim=True),
) -> Measurements:
    """Attention improves on mean pooling, since it adapts its weights to the input."""
    rows, n = 2000, 10
    marked = torch.nn.functional.one_hot(draw.permutation(rows) % n, n).double()[:, None, :, None]
    value, query = draw.normal(rows, 1, n, 1), torch.full((rows, 1, 1, 1), 100.0, dtype=torch.float64)
    wanted = (marked * value).sum(2, keepdim=True)

    def error(output: Tensor, wanted: Tensor | float) -> float:
        return float((output - wanted).square().mean())

    yield at_most(
        "value of a marked token of 10: squared error of attention",
        error(attention(query, marked, value), wanted),
        1e-9,
    )
    yield equal("the same, of the mean, against 0.9", error(pooled(value), wanted), 0.9, 0.15, "2,000 rows")
    scores = draw.normal(rows, 1, n, 1)
    noisy = error(attention(torch.ones_like(query), scores, value), 0.0)
    yield at_least(
        "10 noisy copies of a number: squared error of random scores, over that of the mean",
        noisy / error(pooled(value), 0.0),
        1.5,
    )


@claim(
    latex=r"\sum_j \mathrm{dropout}(A)_{ij}=1",
    source="code of tutorials that drops weights and returns them",
    verdict="refuted",
    conditions="dropout preserves the expected sum of a row, not the sum itself; to inspect weights, read those "
    "before dropout",
)
def dropout_keeps_distributions(
    draw: Draw, *, dropout_p: float = 0.5, drop: Callable[..., Tensor] = AttentionMatrix.matmul
) -> Measurements:
    """Weights after dropout are still distributions."""
    n = 64
    q, k = draw.normal(1, 200, n, 4), draw.normal(1, 200, n, 4)
    ones = torch.ones(1, 200, n, 1, dtype=torch.float64)
    matrix = AttentionMatrix(q, k)
    yield same("sums of rows without dropout, against 1", drop(matrix, ones), ones)
    sums = drop(matrix, ones, dropout_p=dropout_p, seed=draw.integer())
    yield apart("smallest sum of a row after dropout", float(sums.min()), 1.0, 0.3)
    yield apart("largest sum of a row after dropout", float(sums.max()), 1.0, 0.3)
    yield equal("mean of the sums", float(sums.mean()), 1.0, 0.05, "12,800 rows, far more than 6 standard errors")
