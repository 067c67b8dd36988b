"""Claims about related methods: squeeze-and-excitation, CBAM, non-local means, the Kalman filter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.matrix import attention
from saccade.scores import Gaussian
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, at_least, at_most, differ, equal, same
from saccade.vision import CBAM, ChannelAttention, NonLocal, SpatialAttention


def non_local_means_of(patches: Tensor, pixels: Tensor, h: float) -> Tensor:
    """Compute non-local means by definition, averaging pixels with the weights exp(-|P_i - P_j|²/h²) for patches P."""
    weights = (-(patches[:, None] - patches[None]).square().sum(-1) / h**2).exp()
    return weights @ pixels / weights.sum(-1, keepdim=True)


def kalman_update(prior: Tensor, prior_cov: Tensor, seen: Tensor, noise_cov: Tensor) -> Tensor:
    """Return the posterior mean of a Kalman filter after an observation of the full state."""
    gain = prior_cov @ torch.linalg.inv(prior_cov + noise_cov)
    return prior + gain @ (seen - prior)


@claim(
    latex=r"s=\sigma(W_2\,\delta(W_1 z))\ \text{is attention with}\ q=k=z",
    source="tutorials; Hu et al. 2018, arXiv:1709.01507, section 3",
    verdict="refuted",
    conditions="as a matrix it is diag(s): no channel reads another, and each row sums to its gate between 0 and 1, "
    "not to 1. It is gating, not attention",
)
def squeeze_and_excitation_is_attention(
    draw: Draw,
    *,
    gate: Callable[[int], torch.nn.Module] = lambda channels: ChannelAttention(channels, ratio=4),
    gates_of: Callable[[int], ChannelAttention] = lambda channels: ChannelAttention(
        channels, ratio=4, projection_bias=False
    ),
) -> Measurements:
    """Channel attention (squeeze-and-excitation) is attention between channels."""
    channels, size = 16, 5
    module = draw.module(lambda: gate(channels))
    features = draw.normal(1, channels, size, size)
    # The matrix of the map from channels to channels, with fixed gates.
    with torch.no_grad():
        gates = (module(features) / features).mean((2, 3))[0]
        matrix = gates.diag()
        gated = matrix @ features[0].flatten(1)
        yield same("output against diag(gates) times the input", module(features)[0].flatten(1), gated)
        squeeze = draw.module(lambda: gates_of(channels))
        first, second = squeeze.reduce.weight, squeeze.expand.weight  # [4, 16] and [16, 4]
        by_formula = (second @ torch.relu(first @ features[0].mean((1, 2)))).sigmoid()
        yield same("gates, against σ(W₂ δ(W₁ z))", (squeeze(features) / features).mean((2, 3))[0], by_formula, 1e-9)
    yield at_most("largest gate", float(gates.max()), 1.0)
    yield at_least("smallest gate", float(gates.min()), 0.0)
    sums = matrix.sum(-1)
    yield apart("sum of a row nearest to 1", float(sums[(sums - 1).abs().argmin()]), 1.0, 0.05)
    yield apart("sum of all gates, which for one distribution is 1", float(gates.sum()), 1.0, 2.0)


@claim(
    latex=r"\sigma(f^{7\times7}[\mathrm{mean};\max])\ \text{compares a position with all others}",
    source="tutorials; Woo et al. 2018, arXiv:1807.06521, section 3; against it the non-local block: Wang et "
    "al. 2018, arXiv:1711.07971",
    verdict="refuted",
    conditions="the map of CBAM is computed by a convolution: positions beyond its reach have no influence, and each "
    "gate is separately between 0 and 1. A non-local block does compare all positions, "
    "and its rows sum to 1",
)
def spatial_attention_compares_all_positions(
    draw: Draw,
    *,
    gate: Callable[[], torch.nn.Module] = SpatialAttention,
    whole: Callable[[int], CBAM] = lambda channels: CBAM(channels, ratio=2),
    compressed: Callable[[Tensor], Tensor] = lambda features: features.mean(-1, keepdim=True),
    block: Callable[[int], NonLocal] = lambda channels: NonLocal(channels, subsample=1),
) -> Measurements:
    """Spatial attention (CBAM) weights each position by its similarity to all others."""
    channels, size = 4, 12
    module = draw.module(gate).eval()
    features = draw.normal(1, channels, size, size)
    with torch.no_grad():
        plain = module(features)[..., 0, 0]

        def change(index: int) -> float:
            """Return how much the output at the first position changes when the input at ``index`` changes."""
            moved = features.clone()
            moved[..., index, index] += 3.0
            return float((module(moved)[..., 0, 0] - plain).abs().max())

        yield at_most("CBAM: change of the first position when the last one changes", change(-1), 0.0)
        yield at_least("CBAM: its change when a position inside its reach changes", change(2), 1e-4)
        gates = (module(features) / features).mean(1)
        yield apart("CBAM: sum of all gates, which for one distribution is 1", float(gates.sum()), 1.0, 10.0)
        cbam = draw.module(lambda: whole(channels)).eval()
        yield same(
            "CBAM, against its channel gate and then its spatial gate",
            cbam(features),
            cbam.spatial(cbam.channel(features)),
        )
        weights = draw.module(lambda: block(channels)).matrix(features).to_dense()
    of_positions = compressed(features[0].flatten(1).T)
    rank = int(torch.linalg.matrix_rank(of_positions @ of_positions.T))
    yield equal("channels compressed to one, then dot products: rank of the scores", rank, 1)
    yield at_least("non-local block: smallest weight of one position for another", float(weights.min()), 3e-9)
    yield equal("non-local block: sum of a row", float(weights[0, 0, 0].sum()), 1.0, 1e-9)


@claim(
    latex=r"\hat x_i=\frac{\sum_j e^{-\lVert P_i-P_j\rVert^2/h^2}x_j}{\sum_j e^{-\lVert P_i-P_j\rVert^2/h^2}}"
    r"=\mathrm{softmax}\!\Bigl(\tfrac{2P_i\cdot P_j-\lVert P_j\rVert^2}{h^2}\Bigr)x",
    source='Buades, Coll and Morel 2005, "A non-local algorithm for image denoising"',
    verdict="holds if",
    conditions="scores include the norm of the key (a Gaussian score), or all patches have the same norm: otherwise, "
    "plain dot products give different weights",
)
def non_local_means_is_attention(draw: Draw, *, attend: Callable[..., Tensor] = attention) -> Measurements:
    """Non-local means denoising is attention between patches."""
    patches, pixels, h = draw.normal(30, 9), draw.normal(30, 1), 2.5
    expected = non_local_means_of(patches, pixels, h)
    p, x = patches[None, None], pixels[None, None]
    gaussian = attend(p, p, x, score=Gaussian(h / 2**0.5).double())[0, 0]
    yield same("attention with a Gaussian score, bandwidth h/√2 in float32", gaussian, expected, 1e-5)
    norms = patches.square().sum(-1, keepdim=True)
    ones = torch.ones_like(norms)
    longer = (torch.cat([2 * patches / h**2, ones], 1), torch.cat([patches, -norms / h**2], 1))
    dot = attend(*(one[None, None] for one in longer), x, scale=1.0)[0, 0]
    yield same("dot products with the norm of the key as an extra column", dot, expected)
    plain = attend(p, p, x, scale=2 / h**2)[0, 0]
    yield differ("plain dot products", plain, expected, 0.01)
    alike = torch.nn.functional.normalize(patches, dim=-1)
    plain = attend(*2 * (3 * alike[None, None],), x, scale=2 / h**2)[0, 0]
    yield same("plain dot products, patches of one norm", plain, non_local_means_of(3 * alike, pixels, h))


def precision_weighted(prior: Tensor, seen: Tensor, variances: Tensor) -> Tensor:
    """Compute a Kalman update as attention to the prediction and the observation, with their log precisions as bias."""
    value = torch.stack([prior, seen], -1)[None, :, :, None]
    query = torch.zeros_like(value[:, :, :1])
    return attention(query, value, value, bias=-variances.log().T[None, :, None])[0, :, 0, 0]


@claim(
    latex=r"m=\mathrm{softmax}(-\log P,-\log R)\cdot(m^-,z)",
    source="tutorials; Kalman 1960; for transformers Goel and Bartlett 2024, arXiv:2312.06937",
    verdict="holds if",
    conditions="prediction and observation are both keys and values, the logarithms of their precisions are the bias, "
    "and covariances are diagonal. If the observation is the only key, attention returns the observation; with "
    "correlations the weights are matrices, and the estimate may leave the range of prediction and observation",
)
def kalman_update_is_attention(
    draw: Draw,
    *,
    update: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = kalman_update,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] = precision_weighted,
    alone: Callable[[Tensor, Tensor, Tensor], Tensor] = attention,
) -> Measurements:
    """The update of a Kalman filter is attention from the prediction to the observation."""
    prior, seen = draw.normal(5), draw.normal(5) + 1
    variances = draw.uniform(2, 5) + 0.1
    mean = update(prior, variances[0].diag(), seen, variances[1].diag())
    yield same(
        "both as keys and values, log precisions as bias, against the update", attend(prior, seen, variances), mean
    )
    query, key = prior[None, None, None], seen[None, None, None]
    only = alone(query, key, key)[0, 0, 0]
    yield differ("the observation as the only key and value, against the update", only, mean, 0.01)
    prior_cov = torch.tensor([[1.0, 0.9], [0.9, 1.0]], dtype=torch.float64)
    noise_cov = torch.tensor([0.1, 5.0], dtype=torch.float64).diag()
    observed = torch.tensor([1.0, -1.0], dtype=torch.float64)
    after = update(torch.zeros(2, dtype=torch.float64), prior_cov, observed, noise_cov)
    information = torch.linalg.inv(torch.linalg.inv(prior_cov) + torch.linalg.inv(noise_cov))
    yield same("the update, against its information form", after, information @ torch.linalg.inv(noise_cov) @ observed)
    yield apart("correlated: second coordinate, which an average keeps between -1 and 0", float(after[1]), 0.0, 0.7)
