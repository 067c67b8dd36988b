"""Claims about the scale of dot products: the reason for it, and its effects on softmax and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from saccade.support.language import Message
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, at_least, at_most, equal, estimate

_VASWANI = "Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1"


def inverse_root(head_dim: int) -> float:
    """Return the usual scale of attention scores, 1/√d_k."""
    return head_dim**-0.5


def variance_of_products(query_cov: Tensor, key_cov: Tensor, query_mean: Tensor, key_mean: Tensor) -> Tensor:
    """Return the variance of the dot product q·k for independent q and k with the given covariances and means."""
    spread = (query_cov * key_cov.T).sum()
    return spread + query_mean @ key_cov @ query_mean + key_mean @ query_cov @ key_mean


def products(query: Tensor, key: Tensor) -> Tensor:
    """Return the dot product of each query with the key in the same row."""
    return (query * key).sum(-1)


def gradients_by_query(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Return the norms of the gradients of attention outputs with respect to their queries, ``[rows]``.

    Each row has separate keys and values: ``query`` is ``[rows, width]``, ``key`` is ``[rows, keys, width]`` and
    ``value`` is ``[rows, keys]``.
    """
    weights = (torch.einsum("rc,rkc->rk", query, key) * scale).softmax(-1)
    of_scores = weights * (value - (weights * value).sum(-1, keepdim=True))
    return torch.einsum("rk,rkc->rc", of_scores, key).norm(dim=-1) * scale


def law_of_entropy(kv_len: int, sigma: float) -> float:
    """Return the predicted mean entropy of softmax over normal scores with a small standard deviation ``sigma``."""
    return math.log(kv_len) - sigma**2 / 2


def softmax_naively(scores: Tensor) -> Tensor:
    """Return softmax over the last axis, computed without subtracting the maximum, so that large scores overflow."""
    powers = scores.exp()
    return powers / powers.sum(-1, keepdim=True)


def sensitivity(scores: Tensor) -> Tensor:
    """Return 1 - |p|², the trace of softmax's Jacobian, a measure of how sensitive the weights are to the scores."""
    return 1 - scores.softmax(-1).square().sum(-1)


@claim(
    latex=r"\mathbb{E}[QK^\top]=0",
    source=_VASWANI + ", footnote 4",
    verdict="holds if",
    conditions="queries do not depend on keys and one of the two has mean 0. In self-attention both come from the same "
    "tokens: the mean of a token's product with itself is tr(W_qᵀ W_k) for standardised tokens, and d_k for Q = K = X",
)
def products_are_zero_on_average(
    draw: Draw, *, products: Callable[[Tensor, Tensor], Tensor] = products
) -> Measurements:
    """Dot products of queries and keys are 0 on average."""
    samples, width = 50_000, 16
    q, k, mean = draw.normal(samples, width), draw.normal(samples, width), draw.normal(width)
    yield estimate("mean of q·k, independent and centred", products(q, k), 0.0)
    yield estimate("the same, the queries with a mean", products(q + mean, k), 0.0)
    yield estimate("the same, both with a mean of 1 in each entry", products(q + 1, k + 1), width)
    yield estimate("mean of x·x, where query and key are one token", products(q, q), width)
    yield apart("the same", float(products(q, q).mean()), 0.0, width / 2)
    of_queries, of_keys = draw.normal(width, width) / width**0.5, draw.normal(width, width) / width**0.5
    with_itself = products(q @ of_queries, q @ of_keys)
    yield estimate(
        "self-attention, a token with itself, against tr(W_qᵀ W_k)", with_itself, float((of_queries * of_keys).sum())
    )
    shared = products(q @ of_queries, q @ of_queries)
    yield estimate("the same with W_k = W_q, against |W_q|²", shared, float(of_queries.square().sum()))
    yield estimate("the same, a token with another one", products(q @ of_queries, k @ of_queries), 0.0)


@claim(
    latex=r"\mathrm{Var}(q\cdot k)=\mathrm{tr}(\Sigma_q\Sigma_k)"
    r"+\mu_q^\top\Sigma_k\mu_q+\mu_k^\top\Sigma_q\mu_k",
    source="by expansion; " + _VASWANI + ", footnote 4, is the case of independent standardised entries",
    verdict="holds",
    conditions="q and k independent of each other, with any means and covariances",
)
def variance_of_dot_products(
    draw: Draw, *, formula: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = variance_of_products
) -> Measurements:
    """The variance of q·k follows from the means and covariances of q and k."""
    width, samples = 8, 100_000
    mix_q, mix_k = draw.normal(width, width), draw.normal(width, width)
    mean_q, mean_k = draw.normal(width), draw.normal(width)
    q = draw.normal(samples, width) @ mix_q.T + mean_q
    k = draw.normal(samples, width) @ mix_k.T + mean_k
    centred = (q * k).sum(-1) - mean_q @ mean_k
    expected = formula(mix_q @ mix_q.T, mix_k @ mix_k.T, mean_q, mean_k)
    yield estimate("variance of q·k, correlated entries with means", centred.square(), float(expected))


@claim(
    latex=r"\mathrm{Var}(q\cdot k)=d_k",
    source=_VASWANI + ", footnote 4",
    verdict="holds if",
    conditions="q and k are independent of each other, their entries have mean 0 and variance 1, and the entries of "
    "at least one of the two are uncorrelated: at the start of training, not after it",
)
def variance_is_d_k(
    draw: Draw,
    *,
    variance: Callable[[int], float] = float,
    products: Callable[[Tensor, Tensor], Tensor] = products,
) -> Measurements:
    """The dot product of a query and a key has variance d_k."""
    samples = 20_000
    for width in (4, 64):
        q, k = draw.normal(samples, width), draw.normal(samples, width)
        yield estimate(Message("variance of q·k, d_k = {width}", width=width), products(q, k).square(), variance(width))
    width = 64
    square = products(q, q)
    yield estimate("mean of q·q, where query and key are one", square, width)
    yield estimate("variance of q·q", (square - width).square(), 2 * width)
    common_q, common_k = draw.normal(samples, 1), draw.normal(samples, 1)
    alike = products(q + common_q, k + common_k) / 2  # entries with variance 1 and correlation 1/2
    expected = width + width * (width - 1) / 4
    yield estimate("variance of q·k, entries of correlation 1/2 in both", alike.square(), expected)
    yield apart("the same", float(alike.square().mean()), width, 10 * width)


@claim(
    latex=r"\mathrm{Var}\bigl(q\cdot k/\sqrt{d_k}\bigr)=1",
    source=_VASWANI,
    verdict="holds if",
    conditions="the conditions of variance-is-d-k hold; for one fixed query, the variance in its row is |q|²/d_k",
)
def root_scale_standardises(draw: Draw, *, scale: Callable[[int], float] = inverse_root) -> Measurements:
    """Divided by the square root of d_k, dot products have variance 1, whatever the width."""
    samples = 20_000
    for width in (4, 64, 128):
        q, k = draw.normal(samples, width), draw.normal(samples, width)
        scores = (q * k).sum(-1) * scale(width)
        yield estimate(Message("variance of the scaled scores, d_k = {width}", width=width), scores.square(), 1.0)
    row = 3.0 * q[0] / q[0].norm()  # a query of norm 3
    scores = k @ row * scale(128)
    yield estimate("variance in the row of a query of length 3, d_k = 128", scores.square(), 9.0 / 128)


@claim(
    latex=r"\mathrm{tr}\frac{\partial p}{\partial s}=1-\lVert p\rVert^2\to 0",
    source=_VASWANI,
    verdict="holds if",
    conditions="it refers to the median, and d_k is large, well above 2 ln m for m keys: with 100,000 keys nothing is "
    "lost at d_k = 16. The mean falls only as 1/√d_k, since sometimes two scores are close. Small derivatives alone "
    "prove nothing: with many keys each is small with the scale too",
)
def unscaled_gradients_vanish(
    draw: Draw, *, scale: Callable[[int], float] = inverse_root, unscaled: Callable[[int], float] = lambda d: 1.0
) -> Measurements:
    """Without the scale, softmax saturates, and its gradient vanishes."""
    rows, keys = 2000, 16
    medians, means = {}, {}
    for width in (8, 64, 1024):
        # The scores of a fixed query with independent normal keys are normal, with standard deviation |q|.
        scores = draw.normal(rows, width).norm(dim=-1, keepdim=True) * draw.normal(rows, keys)
        yield at_least(
            Message("scaled, d_k = {width}: median", width=width),
            float(sensitivity(scores * scale(width)).median()),
            0.75,
        )
        left = sensitivity(scores * unscaled(width))
        medians[width], means[width] = float(left.median()), float(left.mean())
    yield at_least("unscaled, d_k = 8: median, which has not vanished", medians[8], 0.5)
    yield at_most("unscaled, d_k = 1,024: median", medians[1024], 1.3e-4)
    yield at_least("unscaled, d_k = 1,024: mean, which has not vanished", means[1024], 0.02)
    ratio = math.sqrt(1024 / 64) * means[1024] / means[64]
    yield equal("mean times √d_k, d_k = 1,024 against 64", ratio, 1.0, 0.35, "the law 1/√d_k")
    many = draw.normal(20, 16).norm(dim=-1, keepdim=True) * draw.normal(20, 100_000)
    of_many = float(sensitivity(many * unscaled(16)).median())
    yield at_least("unscaled, d_k = 16, 100,000 keys: median, which has not vanished", of_many, 0.75)
    weights = (many * scale(16)).softmax(-1)
    steepest = float((weights * (1 - weights)).amax(-1).median())
    yield at_most("scaled, d_k = 16, 100,000 keys: largest derivative of a weight by its score, median", steepest, 1e-3)


@claim(
    latex=r"\Bigl\lVert\frac{\partial o}{\partial q}\Bigr\rVert\to 0\ \text{or}\ \to\infty",
    source="tutorials, on leaving out the scale",
    verdict="holds if",
    conditions="it refers to gradients with respect to the query, and d_k is large: those of most queries vanish, and "
    "those of the few queries with two close scores grow as √d_k, so the mean norm stays finite and the mean square "
    "grows as √d_k",
)
def unscaled_gradients_vanish_or_explode(
    draw: Draw, *, scale: Callable[[int], float] = inverse_root, unscaled: Callable[[int], float] = lambda d: 1.0
) -> Measurements:
    """Without the scale, gradients vanish or explode."""
    rows, keys = 1000, 16
    left, steady = {}, {}
    for width in (64, 1024):
        inputs = draw.normal(rows, width), draw.normal(rows, keys, width), draw.normal(rows, keys)
        steady[width] = gradients_by_query(*inputs, scale(width))
        left[width] = gradients_by_query(*inputs, unscaled(width))
    ratio = float(steady[1024].median() / steady[64].median())
    yield equal("scaled: median norm, d_k = 1,024 against 64", ratio, 1.0, 0.15, "1,000 queries")
    yield at_most("scaled: largest norm, d_k = 1,024", float(steady[1024].max()), 2.0)
    yield at_most("unscaled, d_k = 1,024: median norm, which has vanished", float(left[1024].median()), 0.002)
    yield at_least("unscaled, d_k = 1,024: largest norm, which has exploded", float(left[1024].max()), 10.0)
    yield at_least(
        "the same: mean norm, as a multiple of the scaled one", float(left[1024].mean() / steady[1024].mean()), 2
    )
    squares = {width: [norms.square()] for width, norms in left.items()}
    for _ in range(3):  # few norms are large, so the mean square needs more queries, drawn in parts to save memory
        for width, seen in squares.items():
            inputs = draw.normal(rows, width), draw.normal(rows, keys, width), draw.normal(rows, keys)
            seen.append(gradients_by_query(*inputs, unscaled(width)).square())
    growth = float(torch.cat(squares[1024]).mean() / torch.cat(squares[64]).mean())
    yield equal(
        "growth of the mean square from d_k = 64", growth, 4.0, 2.0, "the law √d_k for large d_k, 4,000 queries"
    )


@claim(
    latex=r"e^{s}\ \text{overflows in float32 for}\ s>88.7",
    source="tutorials; for the remedy Blanchard, Higham and Higham 2021, on computing softmax accurately",
    verdict="holds if",
    conditions="softmax is computed naively, as exp over its sum. Subtracting the largest score of the row, as every "
    "library does, keeps it exact without a scale; and scores that are large for another reason overflow even with "
    "the scale",
)
def scaling_keeps_numbers_stable(
    draw: Draw,
    *,
    scale: Callable[[int], float] = inverse_root,
    naive: Callable[[Tensor], Tensor] = softmax_naively,
    shifted: Callable[[Tensor], Tensor] = lambda scores: scores.softmax(-1),
) -> Measurements:
    """Scaling the scores keeps softmax numerically stable."""
    width = 1024
    query, key = draw.normal(256, width), draw.normal(256, width)
    products = query @ key.T

    def share_broken(softmax: Callable[[Tensor], Tensor], factor: float) -> float:
        """Return the share of softmax rows that contain NaN or an error above 10⁻⁴ in float32."""
        scores = (products * factor).float()
        return float((~((softmax(scores) - scores.double().softmax(-1)).abs().amax(-1) < 1e-4)).double().mean())

    yield at_least(
        "exp over its sum, unscaled, d_k = 1,024: share of rows that overflow", share_broken(naive, 1.0), 0.25
    )
    yield equal("the same, scaled by 1/√d_k", share_broken(naive, scale(width)), 0.0)
    yield equal("less the largest score, unscaled", share_broken(shifted, 1.0), 0.0)
    yield at_least("exp over its sum, scaled, queries 30 times as long", share_broken(naive, 30 * scale(width)), 0.25)


@claim(
    latex=r"\mathbb{E}[H]\approx\ln n-\sigma^2/2",
    source="expansion of ln E[exp s] for normal scores; where it ends, Derrida 1981, Phys. Rev. B 24, 2613",
    verdict="holds if",
    conditions="σ is well below √(2 ln n); beyond it a few keys get all the weight, and without a scale σ = √d_k",
)
def entropy_of_normal_scores(
    draw: Draw,
    *,
    law: Callable[[int, float], float] = law_of_entropy,
    softmax: Callable[[Tensor], Tensor] = lambda scores: scores.softmax(-1),
) -> Measurements:
    """Softmax over n normal scores with standard deviation σ has an entropy of about ln n - σ²/2 nats."""
    keys, rows = 4096, 64
    normal = draw.normal(rows, keys)
    entropy = {sigma: torch.special.entr(softmax(sigma * normal)).sum(-1) for sigma in (0.25, 0.5, 1.0, 4.0, 8.0)}
    for sigma in (0.25, 0.5, 1.0):
        yield estimate(
            Message("entropy, σ = {sigma}, n = 4,096", sigma=sigma), entropy[sigma], law(keys, sigma), bias=0.01
        )
    yield apart("entropy, σ = 4", float(entropy[4.0].mean()), law(keys, 4.0), 1.0)
    yield at_most("entropy, σ = 8: d_k = 64 without a scale", float(entropy[8.0].mean()), 2.0)
