"""Claims about softmax: its invariances, Jacobian, Lipschitz constant and entropy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.support.language import Message
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, at_least, at_most, differ, equal, same


def softmax(scores: Tensor) -> Tensor:
    """Return the softmax of scores over the last axis."""
    return scores.softmax(-1)


def jacobian(weights: Tensor) -> Tensor:
    """Return the Jacobian of softmax for one row of weights, diag(p) - p pᵀ."""
    return weights.diag() - torch.outer(weights, weights)


def jacobian_of_rows(weights: Tensor) -> Tensor:
    """Return the Jacobian of softmax for several rows, δ_ik A_ij (δ_jl - A_il), ``[i, j, k, l]``."""
    rows, columns = weights.shape
    same_row, same_column = torch.eye(rows, dtype=weights.dtype), torch.eye(columns, dtype=weights.dtype)
    factor = same_column[None] - weights[:, None]  # [i, j, l]
    return same_row[:, None, :, None] * weights[:, :, None, None] * factor[:, :, None]


def jacobian_as_printed(weights: Tensor) -> Tensor:
    """Return the Jacobian of softmax as some tutorials misprint it, A_ij (δ_ik - A_kj), ``[i, j, k, l]``."""
    rows, columns = weights.shape
    same_row = torch.eye(rows, dtype=weights.dtype)
    printed = weights[:, :, None] * (same_row[:, None, :] - weights.T[None])
    return printed[..., None].expand(rows, columns, rows, columns)


def entropy_slope(scores: Tensor, beta: Tensor) -> Tensor:
    """Return the derivative of the entropy of softmax(βs) with respect to β, which is -β Var(s)."""
    weights = (beta * scores).softmax(-1)
    mean = (weights * scores).sum()
    return -beta * (weights * (scores - mean).square()).sum()


@claim(
    latex=r"\sum_j p_j=1,\quad p_j>0,\quad \mathrm{softmax}(s+c)=\mathrm{softmax}(s)",
    source="by definition",
    verdict="holds",
    conditions="positive in exact arithmetic: in float64, a score 746 below the largest has weight 0, and in float32 "
    "a score 104 below. The order holds within one row; weights of different rows are not comparable. A factor, "
    "unlike a constant, changes the weights",
)
def softmax_gives_distributions(draw: Draw, *, softmax: Callable[[Tensor], Tensor] = softmax) -> Measurements:
    """Softmax gives weights above 0 that sum to 1, keep the order of the scores and ignore a constant added to them."""
    scores = 3 * draw.normal(100, 12)
    weights = softmax(scores)
    yield same("sums of rows against 1", weights.sum(-1), torch.ones(100, dtype=torch.float64))
    yield at_least("smallest weight", float(weights.min()), 1e-300)
    yield same("weights after adding a constant to each row", softmax(scores + 50 * draw.normal(100, 1)), weights)
    order = (weights.argsort(-1) == scores.argsort(-1)).double().mean()
    yield equal("share of positions where the order is preserved", float(order), 1.0)
    far = torch.tensor([0.0, *[-7.0] * 11], dtype=torch.float64)
    yield at_most("weight of a score 7 below the largest, 12 keys", float(softmax(far)[1]), 2e-3)
    near = torch.tensor([0.0, *[-0.2] * 11], dtype=torch.float64)
    yield at_least("weight of a score 0.2 below the largest, 12 keys", float(softmax(near)[1]), 0.05)
    yield differ("weights after doubling the scores", softmax(2 * scores), weights, 0.01)
    single = softmax(torch.tensor([0.0, -200.0, -300.0], dtype=torch.float32))
    yield equal(
        "float32, scores 0, -200, -300: weight of the second less that of the third", float(single[1] - single[2]), 0
    )
    tied, alone = (softmax(torch.tensor(row, dtype=torch.float64)) for row in ([5.0, 5.0], [1.0, -3.0]))
    yield at_most("two rows: weight of 5 beside 5, over weight of 1 beside -3", float(tied[0] / alone[0]), 0.6)


@claim(
    latex=r"\frac{\partial A_{ij}}{\partial S_{kl}}=\delta_{ik}\,A_{ij}(\delta_{jl}-A_{il})",
    source="by differentiation",
    verdict="holds",
    conditions="for one row diag(p) - ppᵀ: symmetric, positive semidefinite, rows that sum to 0, trace 1 - |p|²",
)
def softmax_jacobian(
    draw: Draw,
    *,
    jacobian: Callable[[Tensor], Tensor] = jacobian,
    jacobian_of_rows: Callable[[Tensor], Tensor] = jacobian_of_rows,
) -> Measurements:
    """A weight depends only on the scores of its row: its derivative is the weight times (δ_jl minus the other
    weight).
    """
    scores = draw.normal(3, 5)
    seen = torch.autograd.functional.jacobian(softmax, scores)
    yield same("all derivatives, against automatic ones", jacobian_of_rows(softmax(scores)), seen)
    row = softmax(scores[0])
    one = jacobian(row)
    yield same("derivatives of one row", one, seen[0, :, 0])
    yield same("sums of its rows against 0", one.sum(-1), torch.zeros(5, dtype=torch.float64))
    yield at_least("smallest eigenvalue", float(torch.linalg.eigvalsh(one)[0]), 0.0, 1e-12)
    yield equal("trace against 1 - |p|²", float(one.trace()), float(1 - row.square().sum()))


@claim(
    latex=r"\frac{\partial A_{ij}}{\partial S_{kl}}=A_{ij}(\delta_{ik}-A_{kj})",
    source="tutorials; by differentiation it is the formula of softmax-jacobian",
    verdict="refuted",
    conditions="the right formula is δ_ik A_ij (δ_jl - A_il): the printed formula compares rows instead of columns, "
    "and does not depend on l",
)
def softmax_jacobian_as_printed(
    draw: Draw,
    *,
    printed: Callable[[Tensor], Tensor] = jacobian_as_printed,
    right: Callable[[Tensor], Tensor] = jacobian_of_rows,
    softmax: Callable[[Tensor], Tensor] = softmax,
) -> Measurements:
    """The derivative of weight ij with respect to score kl is A_ij times the difference of δ_ik and A_kj."""
    half = torch.zeros(1, 2, dtype=torch.float64)
    seen = torch.autograd.functional.jacobian(softmax, half)[0, 0, 0]
    claimed = printed(softmax(half))[0, 0, 0]
    yield equal("derivative of weight 1 by score 1, two equal scores", float(seen[0]), 0.25)
    yield apart("derivative of weight 1 by score 2, two equal scores", float(seen[1]), float(claimed[1]), 0.1)
    scores = draw.normal(3, 5)
    every = torch.autograd.functional.jacobian(softmax, scores)
    yield differ("all derivatives of 3 rows of 5", every, printed(softmax(scores)), 0.05)
    query, key, value, upstream = (
        draw.normal(6, 4).requires_grad_(),
        draw.normal(6, 4),
        draw.normal(6, 3),
        draw.normal(6, 3),
    )
    weights = softmax(query @ key.T / 2)
    (automatic,) = torch.autograd.grad(weights @ value, query, upstream)

    def off(formula: Callable[[Tensor], Tensor]) -> float:
        of_scores = torch.einsum("ij,ijkl->kl", upstream @ value.T, formula(weights.detach()))
        return float((of_scores @ key / 2 - automatic).norm() / automatic.norm())

    yield equal("gradient of the query through the right Jacobian, relative error", off(right), 0.0, 1e-9)
    yield apart("gradient of the query through the printed Jacobian, relative error", off(printed), 0.0, 0.3)


@claim(
    latex=r"\lVert\mathrm{softmax}(s)-\mathrm{softmax}(t)\rVert\le\tfrac12\lVert s-t\rVert",
    source="Gershgorin on diag(p) - ppᵀ; Nair 2025, arXiv:2510.23012",
    verdict="holds",
    conditions="times β for softmax(βs); self-attention as a whole has no such bound: Kim et al. 2021, "
    "arXiv:2006.04710",
)
def softmax_is_half_lipschitz(
    draw: Draw, *, bound: float = 0.5, softmax: Callable[[Tensor], Tensor] = softmax
) -> Measurements:
    """Softmax changes at most half as much as its scores."""
    weights = softmax(3 * draw.normal(2000, 6))
    norms = torch.linalg.eigvalsh(weights.diag_embed() - weights[:, :, None] * weights[:, None])[:, -1]
    yield at_most("largest norm of 2,000 Jacobians", float(norms.max()), bound, 1e-12)
    start, end = 3 * draw.normal(2000, 6), 3 * draw.normal(2000, 6)
    ratios = (softmax(start) - softmax(end)).norm(dim=-1) / (start - end).norm(dim=-1)
    yield at_most("largest change of weights over change of scores", float(ratios.max()), bound, 1e-12)
    step = torch.tensor([1e-6, -1e-6], dtype=torch.float64)
    change = (softmax(step) - softmax(-step)).norm() / (2 * step.norm())
    yield equal("the same at two equal scores, where the bound is reached", float(change), bound, 1e-9)


@claim(
    latex=r"\frac{dH}{d\beta}=-\beta\mathrm{Var}_p(s)",
    source="by differentiation",
    verdict="holds",
    conditions="β above 0",
)
def cooling_lowers_entropy(
    draw: Draw,
    *,
    slope: Callable[[Tensor, Tensor], Tensor] = entropy_slope,
    cool: Callable[[Tensor, Tensor], Tensor] = torch.mul,
) -> Measurements:
    """A larger factor before softmax always makes the weights more concentrated."""
    scores = draw.normal(20)
    for number in (0.2, 1.0, 3.0):
        beta = torch.tensor(number, dtype=torch.float64, requires_grad=True)
        weights = cool(scores, beta).softmax(-1)
        entropy = -(weights * weights.log()).sum()
        (seen,) = torch.autograd.grad(entropy, beta)
        yield equal(
            Message("slope of the entropy at β = {number}", number=number),
            float(seen),
            float(slope(scores, beta.detach())),
        )
        yield at_most(Message("the same, against 0, at β = {number}", number=number), float(seen), 0.0)
