"""Claims about random features and random projections: bias, variance, and how many are needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from saccade.support.language import Message
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, at_least, at_most, estimate, same

_CHOROMANSKI = "Choromanski et al. 2021, arXiv:2009.14794"
_WANG = "Wang et al. 2020, arXiv:2006.04768"


def kernel_samples(
    x: Tensor, y: Tensor, directions: Tensor, kind: Literal["positive", "trigonometric"] = "positive"
) -> Tensor:
    """Return an estimate of the kernel exp(x·y) from one random feature, for each of the directions ``[m, d]``."""
    squares = (x.square().sum() + y.square().sum()) / 2
    if kind == "positive":
        return (directions @ (x + y) - squares).exp()
    return squares.exp() * (directions @ (x - y)).cos()


def variance_of_positive(x: Tensor, y: Tensor) -> Tensor:
    """Return the variance of the kernel estimate from one positive random feature."""
    together = (x + y).square().sum().exp()
    return together * (2 * (x @ y)).exp() * (1 - 1 / together)


def variance_of_trigonometric(x: Tensor, y: Tensor) -> Tensor:
    """Return the variance of the kernel estimate from one trigonometric random feature."""
    apart = (-(x - y).square().sum()).exp()
    return (x + y).square().sum().exp() * (-2 * (x @ y)).exp() * (1 - apart) ** 2 / 2


def orthogonal_directions(draw: Draw, count: int, width: int) -> Tensor:
    """Return random orthogonal directions with the norms of standard normal vectors, ``[count, width, width]``."""
    rotation, triangle = torch.linalg.qr(draw.normal(count, width, width))
    rotation = rotation * triangle.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    return rotation.mT * draw.normal(count, width, width).norm(dim=-1, keepdim=True)


def _random_vector(draw: Draw, width: int, length: float) -> Tensor:
    x = draw.normal(width)
    return x * (length / x.norm())


@claim(
    latex=r"e^{x\cdot y}=\mathbb{E}_\omega\bigl[e^{\omega\cdot x-|x|^2/2}e^{\omega\cdot y-|y|^2/2}\bigr]",
    source=_CHOROMANSKI + ", lemma 1",
    verdict="holds",
    conditions="each ω is normal; orthogonal directions have independently drawn lengths",
)
def features_estimate_the_kernel(
    draw: Draw,
    *,
    samples: Callable[..., Tensor] = kernel_samples,
    orthogonal: Callable[[Draw, int, int], Tensor] = orthogonal_directions,
) -> Measurements:
    """Positive random features estimate the softmax kernel without bias."""
    width = 8
    x, y = _random_vector(draw, width, 0.6), _random_vector(draw, width, 0.6)
    directions = draw.normal(200_000, width)
    for kind in ("positive", "trigonometric"):
        yield estimate(
            Message("{kind} features: mean of the estimates", kind=Message(kind)),
            samples(x, y, directions, kind),
            float((x @ y).exp()),
        )
    together = samples(x, y, orthogonal(draw, 25_000, width).flatten(0, 1)).view(-1, width).mean(-1)
    alone = samples(x, y, directions).view(-1, width).mean(-1)
    yield estimate("orthogonal directions: mean of the estimates", together, float((x @ y).exp()))
    ratio = float(together.var() / alone.var())
    yield at_most("variance of 8 orthogonal directions, over that of independent ones", ratio, 0.95)


def kernel_by_features(query: Tensor, key: Tensor, directions: Tensor) -> Tensor:
    """Return the estimates of the kernel for all queries and keys from positive features, ``[q_len, kv_len]``."""
    of_query, of_key = ((x @ directions.T - x.square().sum(-1, keepdim=True) / 2).exp() for x in (query, key))
    return of_query @ of_key.T / len(directions)


@claim(
    latex=r"\tfrac12\lVert\tilde A_i-A_i\rVert_1\to 0\ \text{for}\ m\gg e^{\lvert q+k\rvert^2}",
    source="tutorials; " + _CHOROMANSKI + ", section 2.3 and theorem 4, for bounded norms",
    verdict="holds if",
    conditions="queries and keys are short, or there are many more than exp(|q + k|²) features: for vectors of length "
    "0.8, one draw of 256 misplaces less than a tenth of the attention. For normal entries, d_k = 64 and the usual "
    "scale, |q + k|² is about 16: 256 features misplace more than two fifths, 4,096 more than a quarter. Orthogonal "
    "directions, of which at most d_k exist at once, help little there. That the estimates have no bias does not help",
)
def random_features_approximate_attention(
    draw: Draw,
    *,
    kernel: Callable[[Tensor, Tensor, Tensor], Tensor] = kernel_by_features,
    orthogonal: Callable[[Draw, int, int], Tensor] = orthogonal_directions,
) -> Measurements:
    """Random features approximate the weights of softmax attention."""

    def misplaced(width: int, length: float | None, directions: Tensor) -> float:
        """Return the mean total variation distance between estimated and exact weights, for 64 queries and keys."""
        query, key = draw.normal(64, width), draw.normal(64, width)
        if length is None:
            query, key = query / width**0.25, key / width**0.25
        else:
            query, key = (length * torch.nn.functional.normalize(x, dim=-1) for x in (query, key))
        seen = kernel(query, key, directions)
        weights = seen / seen.sum(-1, keepdim=True)
        return float((weights - (query @ key.T).softmax(-1)).abs().sum(-1).mean() / 2)

    short = "vectors of length 0.8, d_k = 8, 256 features, one draw: share of the attention that is misplaced"
    yield at_most(short, misplaced(8, 0.8, draw.normal(256, 8)), 0.1)
    yield at_most("the same, orthogonal in blocks of 8", misplaced(8, 0.8, orthogonal(draw, 32, 8).flatten(0, 1)), 0.1)
    yield at_least("normal entries, d_k = 64, 256 features: the same", misplaced(64, None, draw.normal(256, 64)), 0.4)
    yield at_least("with 4,096 features", misplaced(64, None, draw.normal(4096, 64)), 0.25)
    blocks = orthogonal(draw, 4, 64).flatten(0, 1)
    yield at_least("with 256, orthogonal in blocks of 64", misplaced(64, None, blocks), 0.4)


def divided(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute linear attention with features, φ(Q)(φ(K)ᵀV), and divide each row by φ(q)·Σφ(k)."""
    sums = query @ (key.T @ value)
    return sums / (query @ key.sum(0))[:, None]


@claim(
    latex=r"\mathrm{Attention}(Q,K,V)\approx\phi(Q)(\phi(K)^\top V)",
    source="tutorials; with the division Katharopoulos et al. 2020, arXiv:2006.16236, equation 5, and "
    + _CHOROMANSKI
    + ", equation 4",
    verdict="refuted",
    conditions="each row must be divided by φ(q)·Σφ(k), as softmax is by its sum: the printed formula gives sums, "
    "not averages, even with exact features",
)
def features_need_no_division(
    draw: Draw,
    *,
    right: Callable[[Tensor, Tensor, Tensor], Tensor] = divided,
    printed: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda query, key, value: query @ (key.T @ value),
) -> Measurements:
    """Attention is approximately φ(Q) (φ(K)ᵀ V), for features φ of the softmax kernel."""
    n, distinct = 12, 5
    # Five distinct keys with one feature each give exactly exp(q·k).
    points, at = draw.normal(distinct, 4), torch.arange(n) % distinct
    query, value = draw.normal(n, 4), draw.normal(n, 3)
    of_query, of_key = (query @ points.T).exp(), torch.eye(distinct, dtype=torch.float64)[at]
    exact = (query @ points[at].T).softmax(-1) @ value
    yield same("divided by the sum, against softmax", right(of_query, of_key, value), exact, 1e-10)
    ones = torch.ones(n, 1, dtype=torch.float64)
    yield same("divided: sums of rows, against 1", right(of_query, of_key, ones), ones, 1e-10)
    most = float(printed(of_query, of_key, ones).max())
    yield apart("as printed: largest sum of a row", most, 1.0, 2.0)


@claim(
    latex=r"\mathbb{E}\,\frac{\phi(q)\cdot\phi(k_j)}{\sum_l\phi(q)\cdot\phi(k_l)}=A_{ij}",
    source="a conclusion often drawn from " + _CHOROMANSKI + ", lemma 1",
    verdict="refuted",
    conditions="numerator and denominator are unbiased, their quotient is not; its bias falls with more features",
)
def performer_attention_is_unbiased(draw: Draw, *, samples: Callable[..., Tensor] = kernel_samples) -> Measurements:
    """A Performer estimates attention without bias."""
    width, trials = 8, 10_000
    query, keys = _random_vector(draw, width, 1.0), torch.stack([_random_vector(draw, width, 1.0) for _ in range(4)])
    keys[0] = query  # the key with the largest weight, which also varies most
    exact = (keys @ query).softmax(0)[0]
    biases = {}
    for features in (4, 64):
        directions = draw.normal(trials * features, width)
        kernels = [samples(query, key, directions).view(trials, features).mean(-1) for key in keys]
        weights = kernels[0] / sum(kernels)
        biases[features] = float(weights.mean() - exact)
        if features == 4:
            error = float(weights.std() / trials**0.5)
            yield apart(
                "mean weight of the nearest key, 4 features", float(weights.mean()), float(exact), 6 * error + 1e-9
            )
    yield at_most("bias with 64 features, as a share of that with 4", abs(biases[64] / biases[4]), 0.5)


@claim(
    latex=r"\mathrm{Var}_+(x,y)=\tfrac1m e^{|x+y|^2}e^{2x\cdot y}\bigl(1-e^{-|x+y|^2}\bigr)",
    source=_CHOROMANSKI + ", lemma 2",
    verdict="holds",
    conditions="independent directions: the error relative to the kernel is √((e^{|x+y|²} - 1)/m), so the number of "
    "features needed grows as e^{|x+y|²}",
)
def how_many_features(
    draw: Draw, *, variance: Callable[[Tensor, Tensor], Tensor] = variance_of_positive
) -> Measurements:
    """The error of positive features grows exponentially with the norm of query plus key."""
    width = 8
    x, y = _random_vector(draw, width, 0.5), _random_vector(draw, width, 0.5)
    errors = kernel_samples(x, y, draw.normal(400_000, width)) - (x @ y).exp()
    yield estimate("variance of one estimate", errors.square(), float(variance(x, y)))


@claim(
    latex=r"\mathrm{Var}_+(x,y)\le\mathrm{Var}_{\text{trig}}(x,y)",
    source="summaries of " + _CHOROMANSKI + ", which says: where the kernel is near 0",
    verdict="refuted",
    conditions="positive features are better where x·y is far below 0, trigonometric ones where x is near y: there "
    "their variance is 0",
)
def positive_features_are_always_better(
    draw: Draw,
    *,
    positive: Callable[[Tensor, Tensor], Tensor] = variance_of_positive,
    trigonometric: Callable[[Tensor, Tensor], Tensor] = variance_of_trigonometric,
) -> Measurements:
    """Positive features have a lower variance than trigonometric ones."""
    width = 8
    x = _random_vector(draw, width, 0.7)
    directions = draw.normal(100_000, width)
    for name, y in (("x = y", x), ("x = -y", -x)):
        seen = kernel_samples(x, y, directions, "trigonometric")
        errors = (seen - (x @ y).exp()).square()
        yield estimate(
            Message("variance of trigonometric features, {name}", name=name), errors, float(trigonometric(x, y)), 1e-12
        )
    gain = float(positive(x, x) - trigonometric(x, x))
    yield apart(
        "variance of positive over that of trigonometric features, x = y, which is claimed to be at most 0", gain, 0, 1
    )
    yield at_least("the same the other way round, x = -y", float(trigonometric(x, -x) - positive(x, -x)), 0.5)


@claim(
    latex=r"\lVert\tilde P w-Pw\rVert\le\varepsilon\lVert Pw\rVert,\quad\mathrm{rank}\tilde P=\Theta(\log n)",
    source=_WANG + ", theorem 1",
    verdict="refuted",
    conditions="the random projection preserves each product up to an additive error of about |P_i||w|/√k, whatever "
    "the "
    "matrix; nothing about attention makes it relative. That trained attention is nearly of low rank is only an "
    "observation",
)
def attention_is_low_rank_by_projection(
    draw: Draw,
    *,
    project: Callable[[Tensor, Tensor], Tensor] = lambda matrix, directions: matrix @ directions.T @ directions,
) -> Measurements:
    """A random projection to Θ(log n) dimensions preserves attention up to a small relative error."""
    n, error_allowed = 512, 0.5
    rank = math.ceil(5 * math.log(n) / (error_allowed**2 - error_allowed**3))  # the theorem requires 250
    weights = (draw.normal(n, 16) @ draw.normal(n, 16).T / 4).softmax(-1)
    values = draw.normal(n, 64)
    directions = draw.normal(rank, n) / rank**0.5
    error = project(weights, directions) @ values - weights @ values
    relative = float(error.norm() / (weights @ values).norm())
    yield apart(
        Message(
            "relative error with k = {rank}, as the theorem asks for ε = 0.5, which is claimed to be ε at most",
            rank=rank,
        ),
        relative,
        error_allowed,
        0.6,
    )
    few, size, cosine = 8, 16, 0.8
    row, across = torch.linalg.qr(draw.normal(size, 2)).Q.mT
    w = cosine * row + (1 - cosine**2) ** 0.5 * across
    errors = [project(row[None], draw.normal(few, size) / few**0.5) @ w - cosine for _ in range(4000)]
    yield estimate(
        "additive error |error|²k/(|P_i|²|w|²), vectors of cosine 0.8, against 1 + cos²",
        torch.cat(errors).square() * few,
        1 + cosine**2,
    )


def printed_projections(directions: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """Return the projections E = δR and F = exp(-δ)R from the proof of Linformer's second theorem."""
    return delta * directions, math.exp(-delta) * directions


@claim(
    latex=r"\lVert\mathrm{softmax}(qK^\top E^\top)FV-\mathrm{softmax}(qK^\top)V\rVert\le\varepsilon",
    source=_WANG + ", theorem 2 and its proof",
    verdict="refuted",
    conditions="this refers to the construction in the proof: for small and large δ its error is that of an output of "
    "zeros, even with twice as many slots as keys. Other projections may do better; those of a Linformer are trained",
)
def linformer_is_exact_by_construction(
    draw: Draw, *, projections: Callable[[Tensor, float], tuple[Tensor, Tensor]] = printed_projections
) -> Measurements:
    """Random projections of keys and values to Θ(d log d) slots preserve the output up to a small error."""
    n, width = 128, 16
    query, key, value = (draw.normal(n, width) for _ in range(3))
    scores = query @ key.T / width**0.5
    exact = scores.softmax(-1) @ value
    directions = draw.normal(2 * n, n) / (2 * n) ** 0.5
    for delta in (1.0, 1 / n, 1e-6):
        of_keys, of_values = projections(directions, delta)
        output = (scores @ of_keys.T).softmax(-1) @ (of_values @ value)
        error = float((output - exact).norm() / exact.norm())
        yield apart(Message("relative error of the output, δ = {delta:.1g}", delta=delta), error, 0.0, 0.5)
