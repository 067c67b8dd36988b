"""Information: what sparse weights do not bound, what they do tell, and what they do not explain."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from saccade.attention import AttentionMatrix
from saccade.theory.claim import claim
from saccade.theory.draw import Draw
from saccade.theory.measurement import Measurements, apart, at_least, at_most, equal, same
from saccade.theory.rank import weights_of

__all__ = ["divergence_from_mean_row", "gaussian_information", "other_weights", "patterns"]


def gaussian_information(weights: Tensor, variance: float) -> float:
    """I(X; AX + ε) in nats for each feature, X standard normal, ε of this variance: half the log-determinant."""
    eye = torch.eye(len(weights), dtype=weights.dtype)
    return float(torch.linalg.slogdet(eye + weights @ weights.T / variance)[1]) / 2


def divergence_from_mean_row(weights: Tensor) -> float:
    """Mutual information of query and key position, as the mean divergence of rows from the mean row."""
    mean = weights.mean(0)
    ratio = torch.where(weights > 0, weights * (weights / mean).log(), 0.0)
    return float(ratio.sum(-1).mean())


def other_weights(weights: Tensor, value: Tensor) -> Tensor:
    """Rows that sum to 1, are not below 0, and give the same output: as far from ``weights`` as one direction allows.

    A row may move along anything orthogonal to the columns of the values and to the ones, until a weight reaches 0.
    """
    constraints = torch.cat([value, torch.ones(len(value), 1, dtype=value.dtype)], 1)
    basis = torch.linalg.qr(constraints).Q
    towards = torch.linspace(-1, 1, len(value), dtype=value.dtype).square()
    direction = towards - basis @ (basis.T @ towards)
    room = torch.where(direction < 0, -weights / direction, torch.inf).amin(-1, keepdim=True)
    return weights + room * direction


def patterns(n: int) -> dict[str, Tensor]:
    """Three matrices of n queries and keys: one key for each query, the same key for all, all keys alike."""
    eye = torch.eye(n, dtype=torch.float64)
    return {"one key each": eye, "sink": eye[:1].expand(n, n), "uniform": torch.full_like(eye, 1 / n)}


@claim(
    latex=r"A\ \text{sparse}\ \Rightarrow\ I(X;AX)\ \text{small}",
    source='tutorials; against it Saxe et al. 2018, "On the information bottleneck theory of deep learning"',
    verdict="refuted",
    conditions="for a deterministic map I(X; Z) is the entropy of Z. With noise it is (d/2) log det(I + AAᵀ/σ²), which "
    "singular values decide: of two patterns with one key per query one keeps everything, the other one token",
)
def sparse_weights_bound_information(
    draw: Draw, *, information: Callable[[Tensor, float], float] = gaussian_information
) -> Measurements:
    """Sparse weights bound the information that passes from the input to the output."""
    n, variance = 16, 0.01
    found = {name: information(one, variance) for name, one in patterns(n).items()}
    yield equal("one key each (entropy 0): nats, by hand", found["one key each"], n / 2 * math.log(101), 1e-9)
    yield equal("sink (entropy 0): nats, by hand", found["sink"], math.log(1 + n * 100) / 2, 1e-9)
    yield equal("uniform (entropy ln 16): nats, by hand", found["uniform"], math.log(101) / 2, 1e-9)
    yield apart("one key each, which is sparser than uniform weights", found["one key each"], found["uniform"], 30.0)
    soft = weights_of(draw.normal(n, 4), draw.normal(n, 4))
    between = information(soft, variance)
    yield at_least("random weights, which are dense, against a sink, which is sparse", between - found["sink"], 1.0)
    # Two fair coins as tokens, no noise: outcomes of AX that can be told apart.
    for name, a, expected in (("permutation", 0.0, 4), ("weights 0.7 and 0.3", 0.7, 4), ("uniform", 0.5, 3)):
        told = {(round(a * x + (1 - a) * y, 9), round((1 - a) * x + a * y, 9)) for x in (0, 1) for y in (0, 1)}
        yield equal(f"two coins, {name}: outcomes told apart", len(told), expected)


@claim(
    latex=r"I=H(\bar a)-\tfrac1n\sum_i H(a_i)=\tfrac1n\sum_i\mathrm{KL}(a_i\Vert\bar a),\qquad 0\le I\le\ln n",
    source="Cover and Thomas 2006, section 2.4, for a query drawn at random and the key drawn from its row",
    verdict="holds",
    conditions="rows that sum to 1; a causal mask alone makes it more than 0",
)
def position_information(
    draw: Draw, *, divergence: Callable[[Tensor], float] = divergence_from_mean_row
) -> Measurements:
    """How much the place of a query says about where it looks follows exactly from entropies and column sums."""
    n = 24
    for name, one in patterns(n).items():
        expected = math.log(n) if name == "one key each" else 0.0
        yield equal(f"{name}: nats", divergence(one), expected)
    matrix = AttentionMatrix(draw.normal(1, 1, n, 4), draw.normal(1, 1, n, 4))
    mean = matrix.received()[0, 0] / n
    entropies = float(torch.special.entr(mean).sum() - matrix.entropy()[0, 0].mean())
    yield equal("random weights, from entropies and column sums", entropies, divergence(matrix.to_dense()[0, 0]))
    yield at_most("the same, against ln n", entropies, math.log(n))


@claim(
    latex=r"O=AV\ \Rightarrow\ A\ \text{is determined}",
    source='tutorials ("interpretable"); against it Jain and Wallace 2019, arXiv:1902.10186, and Brunner et al. 2020, '
    "arXiv:1908.04211",
    verdict="refuted",
    conditions="with more keys than d_v + 1, other rows that sum to 1 give the same output for these values; whether "
    "weights explain is a question about interventions, not about weights",
)
def weights_explain_the_output(
    draw: Draw, *, other: Callable[[Tensor, Tensor], Tensor] = other_weights
) -> Measurements:
    """The weights explain the output: no others would give it."""
    n, width = 40, 8
    value = draw.normal(n, width)
    weights = weights_of(draw.normal(n, 4), draw.normal(n, 4))
    found = other(weights, value)
    yield same("output of the other weights", found @ value, weights @ value, 1e-10)
    yield same("sums of their rows, against 1", found.sum(-1), torch.ones(n, dtype=torch.float64), 1e-10)
    yield at_least("their smallest weight", float(found.min()), 0.0, 1e-12)
    moved = float((found - weights).abs().sum(-1).mean() / 2)
    yield apart("share of the attention that moved elsewhere, mean over queries", moved, 0.0, 0.005)
