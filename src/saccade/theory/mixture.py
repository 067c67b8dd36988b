"""Claims about attention as inference in a mixture model: posterior, EM, mean shift, Hopfield energy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.matrix import attention
from saccade.scores import Gaussian
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, at_least, at_most, differ, same
from saccade.theory.rank import weights_of


def posterior(query: Tensor, key: Tensor, log_prior: Tensor, variance: float) -> Tensor:
    """Return the posterior of mixture components with priors π_j, given q ~ N(k_j, variance I), by Bayes' rule."""
    densities = -(query[:, None] - key[None]).square().sum(-1) / (2 * variance)
    joint = densities + log_prior
    return (joint - joint.logsumexp(-1, keepdim=True)).exp()


def hopfield_energy(state: Tensor, patterns: Tensor, beta: float) -> Tensor:
    """Return -lse(β X ξ) / β + |ξ|² / 2, the energy of a continuous Hopfield network up to a constant."""
    return state.square().sum(-1) / 2 - (beta * state @ patterns.T).logsumexp(-1) / beta


def _attend_to_patterns(state: Tensor, patterns: Tensor, beta: float) -> Tensor:
    """Update the state of a Hopfield network by attention, with the stored patterns as keys and values."""
    return attention(state[None, None], patterns[None, None], patterns[None, None], scale=beta)[0, 0]


def _mean_shift(query: Tensor, key: Tensor) -> Tensor:
    """Move points by one iteration of mean shift, that is, attention with a Gaussian score and the keys as values."""
    return attention(query[None, None], key[None, None], key[None, None], score=Gaussian().double())[0, 0]


@claim(
    latex=r"A_{ij}=p(z_i=j\mid q_i),\quad q\mid z=j\sim\mathcal{N}(k_j,\sqrt{d_k}\,I)",
    source="tutorials; Bayes' rule, as in Nguyen et al. 2022, arXiv:2110.08678",
    verdict="holds if",
    conditions="all keys have the same norm, or the prior is tilted by it: π_j ∝ exp(|k_j|²/(2√d_k)). A bias is the "
    "logarithm of a prior, a mask a prior of 0",
)
def weights_are_a_posterior(
    draw: Draw, *, posterior: Callable[[Tensor, Tensor, Tensor, float], Tensor] = posterior
) -> Measurements:
    """Weights are the posterior probabilities of a mixture whose components are the keys: the E-step."""
    n, width = 9, 4
    q, k = draw.normal(6, width), draw.normal(n, width)
    variance = width**0.5
    weights = weights_of(q, k)
    flat, tilted = torch.zeros(n, dtype=torch.float64), k.square().sum(-1) / (2 * variance)
    yield same("weights against the posterior, prior tilted by the norms", posterior(q, k, tilted, variance), weights)
    unit = k / k.norm(dim=-1, keepdim=True)
    yield same("keys of one norm, flat prior", posterior(q, unit, flat, variance), weights_of(q, unit))
    yield differ("keys of different norms, flat prior", posterior(q, k, flat, variance), weights, 0.01)
    prior = draw.normal(n)
    yield same("a bias against a prior", posterior(q, unit, prior, variance), weights_of(q, unit, bias=prior))


@claim(
    latex=r"o_i=\sum_j A_{ij}v_j\ \text{is the M-step}",
    source='tutorials; Dempster, Laird and Rubin 1977 for the M-step; Carreira-Perpiñán 2007, "Gaussian '
    'mean-shift is an EM algorithm", for the mixture that moves',
    verdict="holds if",
    conditions="values are the keys, the score is Gaussian, and one point is observed under a mixture whose "
    "components move rigidly: the weighted sum is the position to which the query moves. It does not hold for the "
    "mixture that is usually fitted, in which each component averages data points with weights whose columns sum to "
    "1: in attention, the rows do",
)
def weighted_sum_is_an_m_step(
    draw: Draw,
    *,
    m_step: Callable[[Tensor, Tensor], Tensor] = lambda weights, data: (weights / weights.sum(0)).T @ data,
    weights: Callable[[Tensor, Tensor], Tensor] = weights_of,
    move: Callable[[Tensor, Tensor], Tensor] = _mean_shift,
) -> Measurements:
    """The weighted sum of values is the M-step of expectation maximisation."""
    n, width = 8, 3
    # The mixture has components k_j - q, which q moves together, and the point 0 is observed. The best q makes the
    # gradient of the expected likelihood 0.
    keys, query = draw.normal(n, width), draw.normal(5, width)
    share = posterior(query, keys, torch.zeros(n, dtype=torch.float64), 1.0)
    moved = move(query, keys)
    slope = (share[:, :, None] * (keys - moved[:, None])).sum(1)
    yield same("a mixture that moves: gradient at attention's sum, against 0", slope, torch.zeros_like(slope))
    likelihood = [(-(keys - point[:, None]).square().sum(-1) / 2).logsumexp(-1) for point in (query, moved)]
    yield at_least("smallest rise of its log-likelihood", float((likelihood[1] - likelihood[0]).min()), 0.0, 1e-12)
    # The usual mixture: its means are fitted to data.
    data = draw.normal(n, width)
    responsibilities = weights(data, data)
    best = m_step(responsibilities, data)
    slope = ((responsibilities / responsibilities.sum(0))[:, :, None] * (data[:, None] - best)).sum(0)
    yield same("a mixture that is fitted: gradient at the M-step, against 0", slope, torch.zeros_like(slope))
    difference = float((responsibilities @ data - best).norm() / best.norm())
    yield apart("attention's sum against that M-step, relative difference", difference, 0.0, 0.02)
    sums = float((responsibilities.sum(0) - 1).abs().max())
    yield apart("sums of the columns of the weights, largest distance from 1", sums, 0.0, 0.02)


@claim(
    latex=r"q\leftarrow\sum_j p(j\mid q)\,k_j\ \Rightarrow\ \textstyle\sum_j e^{-|q-k_j|^2/2\sigma^2}\ \text{grows}",
    source='Cheng 1995, "Mean shift, mode seeking, and clustering"',
    verdict="holds",
    conditions="values are the keys, and scores include the norms of the keys (`saccade.scores.Gaussian`)",
)
def mean_shift_climbs(
    draw: Draw,
    *,
    step: Callable[[Tensor, Tensor], Tensor] = _mean_shift,
) -> Measurements:
    """Repeated attention with the keys as values is mean shift: it climbs the density of the keys."""
    keys, at = draw.normal(40, 2) * 2, draw.normal(20, 2) * 2
    heights = []
    for _ in range(30):
        heights.append((-(at[:, None] - keys).square().sum(-1) / 2).logsumexp(-1))
        at = step(at, keys)
    steps = torch.stack(heights).diff(dim=0)
    yield at_least("smallest rise of the log-density in a step", float(steps.min()), 0.0, 1e-12)
    yield at_least("mean rise over 30 steps", float(steps.sum(0).mean()), 0.15)


@claim(
    latex=r"\xi\leftarrow X^\top\mathrm{softmax}(\beta X\xi)\ \Rightarrow\ "
    r"E(\xi)=-\tfrac1\beta\mathrm{lse}(\beta X\xi)+\tfrac12|\xi|^2\ \text{falls}",
    source="Ramsauer et al. 2021, arXiv:2008.02217, theorem 1",
    verdict="holds",
    conditions="values are the keys, β above 0",
)
def hopfield_energy_falls(
    draw: Draw, *, step: Callable[[Tensor, Tensor, float], Tensor] = _attend_to_patterns
) -> Measurements:
    """Repeated attention to stored patterns is a Hopfield network: its energy never rises."""
    patterns, state, beta = draw.normal(20, 16), draw.normal(10, 16), 0.5
    energies = []
    for _ in range(20):
        energies.append(hopfield_energy(state, patterns, beta))
        state = step(state, patterns, beta)
    yield at_most("largest rise of the energy in a step", float(torch.stack(energies).diff(dim=0).max()), 0.0, 1e-12)
    stored = 8 * torch.nn.functional.normalize(draw.normal(20, 64), dim=-1)
    recalled = stored + 0.3 * draw.normal(20, 64)
    for _ in range(3):
        recalled = step(recalled, stored, 1.0)
    farthest = float((recalled - stored).norm(dim=-1).max())
    yield at_most(
        "largest distance of 20 noisy patterns of length 8 to their originals, after 3 steps, β = 1", farthest, 1e-9
    )
