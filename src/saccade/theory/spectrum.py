"""Claims about the spectrum of attention matrices: their eigenvalues and singular values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from saccade.masks import Causal, Documents, Mask
from saccade.support.language import Message
from saccade.theory.claim import Draw, claim
from saccade.theory.measurement import Measurements, apart, at_least, at_most, equal, same
from saccade.theory.rank import weights_of

_CAUSAL = Causal()
_PACKED = Documents([15, 25])


def moduli(matrix: Tensor) -> Tensor:
    """Return the absolute values of a matrix's eigenvalues, largest first."""
    return torch.linalg.eigvals(matrix).abs().sort(descending=True).values


def _random_weights(draw: Draw, n: int) -> Tensor:
    return weights_of(draw.normal(n, 4), draw.normal(n, 4))


@claim(
    latex=r"A\mathbf{1}=\mathbf{1},\quad|\lambda|\le 1,\quad|\lambda_2|\le\max_{i,k}\mathrm{TV}(a_i,a_k)",
    source="Perron and Frobenius; Dobrushin 1956",
    verdict="holds if",
    conditions="there are as many queries as keys (other matrices have no eigenvalues), no empty rows, no dropout and "
    "no sink logit. Without a mask 1 is a simple eigenvalue, and the others may be complex; if two sequences are "
    "packed, 1 is a double eigenvalue, and the vector of ones is not its only eigenvector",
)
def largest_eigenvalue_is_one(
    draw: Draw,
    *,
    weights: Callable[[Draw, int], Tensor] = _random_weights,
    spectrum: Callable[[Tensor], Tensor] = moduli,
    packed: Mask | None = _PACKED,
) -> Measurements:
    """The largest eigenvalue of an attention matrix is 1, and the vector of ones is an eigenvector for it."""
    n = 40
    matrix = weights(draw, n)
    ones = torch.ones(n, dtype=torch.float64)
    yield same("A times ones, against ones", matrix @ ones, ones)
    values = spectrum(matrix)
    yield equal("largest absolute value", float(values[0]), 1.0, 1e-9)
    distance = (matrix[:, None] - matrix[None]).abs().sum(-1).max() / 2
    yield at_most("second largest, against the largest distance of two rows", float(values[1]), float(distance), 1e-9)
    two = spectrum(weights_of(draw.normal(n, 4), draw.normal(n, 4), packed))
    yield equal("two texts packed: eigenvalues of absolute value 1", int((two > 1 - 1e-9).sum()), 2)


@claim(
    latex=r"\lambda\to 1\ \Leftrightarrow\ \text{spread},\qquad\lambda\to 0\ \Leftrightarrow\ \text{concentrated}",
    source="tutorials",
    verdict="refuted",
    conditions="a sink (all weight on one key) and uniform weights have the same eigenvalues, 1 and 0; one key per "
    "query, all of them distinct, has all of absolute value 1. Entropy measures concentration; singular values "
    "distinguish a sink from uniform weights",
)
def eigenvalues_show_concentration(draw: Draw, *, spectrum: Callable[[Tensor], Tensor] = moduli) -> Measurements:
    """Eigenvalues near 1 mean that attention is spread out, eigenvalues near 0 that it is concentrated."""
    n = 6
    eye = torch.eye(n, dtype=torch.float64)
    uniform, sink = torch.full_like(eye, 1 / n), eye[:1].expand(n, n)
    yield same(
        "absolute eigenvalues of uniform weights (entropy ln 6) and of a sink (entropy 0)",
        spectrum(uniform),
        spectrum(sink),
        1e-7,
    )
    for name, weights in (("each token to itself", eye), ("each token to the one before", eye.roll(1, 0))):
        yield apart(
            Message("smallest eigenvalue of {name}, of entropy 0", name=Message(name)),
            float(spectrum(weights)[-1]),
            0.0,
            0.99,
        )


@claim(
    latex=r"\mathrm{spec}(A)=\{A_{11},\dots,A_{nn}\}",
    source="a triangular matrix",
    verdict="holds",
    conditions="a causal mask, as many queries as keys",
)
def causal_eigenvalues_are_the_diagonal(draw: Draw, *, mask: Mask | None = _CAUSAL) -> Measurements:
    """The eigenvalues of a causal attention matrix are the weights that tokens give to themselves."""
    matrix = weights_of(draw.normal(12, 4), draw.normal(12, 4), mask)
    values = torch.linalg.eigvals(matrix)
    yield at_most("largest imaginary part", float(values.imag.abs().max()), 0.0, 1e-6)
    diagonal = matrix.diag().sort(descending=True).values
    yield same("eigenvalues against the diagonal", values.real.sort(descending=True).values, diagonal, 1e-6)


@claim(
    latex=r"1\le\sigma_1\le\sqrt{\max_j\textstyle\sum_i A_{ij}}\le\sqrt n",
    source="‖A‖₂² ≤ ‖A‖₁‖A‖∞",
    verdict="holds",
    conditions="n queries and n keys, no empty rows",
)
def singular_values_show_sinks(
    draw: Draw, *, largest: Callable[[Tensor], Tensor] = lambda matrix: torch.linalg.svdvals(matrix)[0]
) -> Measurements:
    """The largest singular value lies between 1, for uniform weights, and the root of n, for a sink."""
    n = 16
    eye = torch.eye(n, dtype=torch.float64)
    yield equal("uniform weights", float(largest(torch.full_like(eye, 1 / n))), 1.0)
    yield equal("a sink, n = 16", float(largest(eye[:1].expand(n, n))), 4.0)
    matrix = _random_weights(draw, n)
    norm, bound = float(largest(matrix)), float(matrix.sum(0).max().sqrt())
    yield at_least("random weights, against 1", norm, 1.0, 1e-12)
    yield at_most("the same, against the root of the largest column sum", norm, bound, 1e-12)
