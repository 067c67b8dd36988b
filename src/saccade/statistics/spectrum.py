"""Spectrum of a matrix: its largest singular values and its stable rank, computed in a few passes over the matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.statistics.concentration import SquaredNorm
from saccade.statistics.row_block import Block, as_slice
from saccade.statistics.statistic import MatrixInfo, MatrixLike, Statistic
from saccade.support.validation import check_int, check_number


class Spectrum(NamedTuple):
    """The largest singular values of the attention matrix of each head, with error bounds.

    Attributes:
        values: ``[batch, heads, k]``, largest first.
        residuals: upper bounds on the distance from each value to a singular value of the matrix,
            ``[batch, heads, k]``.
        sweeps: number of passes over the matrix.
    """

    values: Tensor
    residuals: Tensor
    sweeps: int


class StableRank(NamedTuple):
    """The stable rank of the attention matrix of each head, ``[batch, heads]``, with an error bound."""

    values: Tensor
    residuals: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class _Gram(Statistic[Tensor, Tensor]):
    """The product ``A.mT @ (A @ x)`` for x ``[batch, heads, kv_len, width]``, computed in one pass over the matrix."""

    x: Tensor

    def start(self, info: MatrixInfo) -> Tensor:
        return torch.zeros(self.x.shape, dtype=info.sum_dtype, device=info.device)

    def add(self, state: Tensor, block: Block) -> Tensor:
        weights = block.weights
        x = self.x[block.batch, block.heads][:, :, block.keys].to(weights.dtype)
        for span, sums in block.by_range((weights.mT @ (weights @ x)).mT):
            state[block.batch, block.heads, as_slice(span)] += sums.mT
        return state

    def merge(self, state: Tensor, other: Tensor) -> Tensor:
        return state + other

    def finish(self, state: Tensor) -> Tensor:
        return state


def singular_values(matrix: MatrixLike, k: int = 1, *, tolerance: float = 1e-4, max_sweeps: int = 24) -> Spectrum:
    r"""Compute the k largest singular values of the attention matrix of each head, with error bounds.

    .. math:: \sigma_1 \ge 1 \text{ where rows sum to 1}, \qquad \sigma_1 \le \sqrt{\text{largest column sum}}

    A sink has one singular value of :math:`\sqrt n`, uniform attention has one singular value of 1, and a head that
    attends to the previous token has n singular values of 1 (under a causal mask, where the first token attends to
    itself: √2, n - 2 ones, and 0). Eigenvalues do not distinguish these patterns, because the eigenvalues of a
    causal matrix are its diagonal.

    A block Krylov space of :math:`A^\top A` grows with each pass over the matrix, until every residual is below the
    tolerance or the maximum number of passes is reached. The residuals show the accuracy. In float32 they do not fall
    below about 1e-5.

    Args:
        matrix: an attention matrix from any mechanism.
        k: number of singular values.
        tolerance: the largest accepted residual, relative to the largest singular value.
        max_sweeps: maximum number of passes over the matrix.

    Raises:
        TypeError, ValueError: k and max_sweeps are not ints of at least 1, or the tolerance is not a number above 0.

    Cost: usually 5 to 15 passes over the matrix, each with two thin products; O(kv_len · (k + 2) · passes) memory.

    Example:
        >>> from saccade import AttentionMatrix
        >>> x = torch.zeros(1, 1, 9, 4)
        >>> singular_values(AttentionMatrix(x, x)).values.round(decimals=3)
        tensor([[[1.]]])

    Reference: Musco and Musco 2015, arXiv:1504.05477, algorithm 2.
    """
    check_int("k", k)
    check_int("max_sweeps", max_sweeps)
    check_number("tolerance", tolerance, above=0.0)
    batch, heads, q_len, kv_len = matrix.shape
    rank = min(k, q_len, kv_len)
    info = MatrixInfo.of(matrix)
    wide = info.sum_dtype
    values = torch.zeros(batch, heads, k, dtype=wide, device=matrix.device)
    residuals, sweeps = values.clone(), 0
    with torch.no_grad():
        for state in _krylov_sweeps(matrix, rank, max_sweeps, wide) if rank and batch * heads else ():
            theta, residual, sweeps = state
            sigma = theta.clamp_min(0.0).sqrt()
            values[..., :rank] = sigma
            # Some singular value s has |s² - theta| <= residual, so |s - sigma| <= residual / sigma and <= √residual.
            residuals[..., :rank] = torch.minimum(residual / sigma.clamp_min(1e-300), residual.sqrt())
            if bool((residuals <= tolerance * values[..., :1]).all()):
                break
    return Spectrum(values.to(info.dtype), residuals.to(info.dtype), sweeps)


def _krylov_sweeps(
    matrix: MatrixLike, rank: int, max_sweeps: int, wide: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield squared singular values (largest first), residuals and the number of passes, as the Krylov space grows."""
    batch, heads, _, kv_len = matrix.shape
    width = min(rank + 2, kv_len)  # two more than requested, so that the last one converges as well
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(kv_len, width, generator=generator, dtype=torch.float64, device="cpu")
    start[:, 0] = 1.0  # if rows sum to 1, the vector of ones is usually close to the first singular vector
    new = torch.linalg.qr(start.to(matrix.device, wide).expand(batch, heads, -1, -1)).Q
    basis, images = new[..., :0], new[..., :0]
    for sweep in range(1, max_sweeps + 1):
        image = matrix.compute(_Gram(new))[0].to(wide)
        basis, images = torch.cat([basis, new], -1), torch.cat([images, image], -1)
        small = basis.mT @ images
        theta, vectors = torch.linalg.eigh((small + small.mT) / 2)
        theta, vectors = theta.flip(-1)[..., :rank], vectors.flip(-1)[..., :rank]
        residual = (images @ vectors - (basis @ vectors) * theta[..., None, :]).norm(dim=-2)
        yield theta, residual, sweep
        width = min(width, kv_len - basis.shape[-1])
        if width == 0:
            return  # the space is complete
        rest = image[..., :width] - basis @ (basis.mT @ image[..., :width])
        norm = rest.norm(dim=-2, keepdim=True)
        # If the subspace is invariant, continue with random vectors.
        other = torch.randn(kv_len, width, generator=generator, dtype=torch.float64, device="cpu").to(rest)
        rest = torch.where(norm > 1e-10 * image.norm(dim=-2).amax(-1)[..., None, None], rest / norm, other)
        for _ in range(2):  # orthogonalise twice, because a single pass loses digits
            new = torch.linalg.qr(rest - basis @ (basis.mT @ rest)).Q
            rest = new


def stable_rank(matrix: MatrixLike, *, tolerance: float = 1e-4, max_sweeps: int = 24) -> StableRank:
    r"""Compute the stable rank of the attention matrix of each head, ``[batch, heads]``, with an error bound.

    .. math:: \frac{\|A\|_F^2}{\sigma_1^2}, \qquad 1 \le \text{stable rank} \le \text{rank}

    This is roughly the number of significant directions: 1 if all rows are equal, n if each query attends to a
    different key. A larger scale may raise it, because nearly equal rows become distinct. The result is 0 for a head
    whose queries attend to nothing.

    Args:
        matrix, tolerance, max_sweeps: see `singular_values`.

    Cost: one more pass over the matrix than `singular_values`.

    Example:
        >>> from saccade import AttentionMatrix, masks
        >>> x = torch.zeros(1, 1, 5, 4)
        >>> stable_rank(AttentionMatrix(x, x, masks.Window(0, 0))).values
        tensor([[5.]])

    Reference: Rudelson and Vershynin 2007, arXiv:math/0503442, section 1.
    """
    spectrum = singular_values(matrix, 1, tolerance=tolerance, max_sweeps=max_sweeps)
    norm = matrix.compute(SquaredNorm())[0].sum(-1)
    largest, off = spectrum.values[..., 0], spectrum.residuals[..., 0]
    values = torch.where(largest > 0, norm / largest.square(), 0.0)
    least = (largest - off).clamp_min(torch.finfo(values.dtype).tiny)
    worst = torch.where(largest > 0, norm / least.square() - values, 0.0)
    return StableRank(values, worst)
