"""Nystrom: softmax attention approximated through landmarks."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.masks import Mask
from saccade.mechanisms.checked_mechanism import Approximate, Inputs, scale_of
from saccade.mechanisms.low_rank import LowRankMatrix, MaskedTokens, NarrowSoftmax, hidden_at, why_not_keys_only
from saccade.support.torch_modes import without_autocast
from saccade.support.validation import check_int, check_number


class Nystrom(Approximate):
    r"""Softmax attention in linear time, approximated through a few landmarks (means of neighbouring tokens).

    .. math:: A \approx \mathrm{softmax}(Q \tilde K^\top)\, \mathrm{softmax}(\tilde Q \tilde K^\top)^{+}\,
              \mathrm{softmax}(\tilde Q K^\top)

    The result is exact with one landmark for each token and the exact pseudo-inverse. With fewer landmarks, it is exact
    if all tokens that are averaged in a landmark are equal. Landmarks also average over later tokens, so the mechanism
    is not causal. Weights may be below 0.

    Args:
        num_landmarks: number of landmarks for the queries, and for the keys; a shorter sequence has one for each token.
        iterations: number of iterations for the pseudo-inverse; None to compute it exactly, from singular values.
        scale: scale of the dot products; ``head_dim ** -0.5`` when None.

    The exact pseudo-inverse magnifies the error of the landmarks, without limit if two of them are nearly equal; a few
    iterations do not. If neighbouring queries or keys are unrelated, neither gives a useful result; see
    `saccade.compare`.

    The means exclude masked keys and tokens at position -1. If there are as many queries as keys, they also exclude
    queries at positions where the mask excludes the key. The contents of padding then have no effect.

    Raises:
        TypeError, ValueError: a count below 1, or a scale that is not a finite number.
        UnsupportedError: a mask that lets queries see different keys.

    Cost: O((q_len + kv_len) * num_landmarks * (head_dim + value_dim) + num_landmarks ** 3) time, and memory that is
    linear in the lengths.

    Example:
        >>> import torch, saccade as sc
        >>> _ = torch.manual_seed(0)
        >>> query, key, value = (torch.randn(1, 2, 96, 16).cumsum(2) / 4 for _ in range(3))  # neighbours are alike
        >>> exact = sc.attention(query, key, value)
        >>> for num_landmarks in (12, 24, 96):
        ...     error = (Nystrom(num_landmarks, iterations=None)(query, key) @ value - exact).norm() / exact.norm()
        ...     print(f"{num_landmarks} landmarks: {error:.0%}")
        12 landmarks: 28%
        24 landmarks: 4%
        96 landmarks: 0%

    Reference: Xiong et al. 2021, arXiv:2102.03902.
    """

    def __init__(self, num_landmarks: int = 64, *, iterations: int | None = 6, scale: float | None = None):
        super().__init__()
        self.num_landmarks = check_int("num_landmarks", num_landmarks)
        self.iterations = None if iterations is None else check_int("iterations", iterations)
        self.scale = None if scale is None else check_number("scale", scale)

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        return why_not_keys_only(mask, "landmarks are means of tokens, some of which would be hidden from a query")

    def _matrix_of(self, inputs: Inputs) -> NystromMatrix:
        batch, heads, q_len, kv_len = inputs.shape
        tokens = MaskedTokens.of(inputs)
        q, k, hidden = tokens.query, tokens.key, tokens.hidden
        left_out = hidden_at(inputs, tokens.rows) if q_len == kv_len else tokens.padding_rows
        scale = scale_of(self.scale, inputs.query.shape[3])
        with without_autocast(inputs.query.device):
            q_means, no_rows = segment_means(q, left_out, min(self.num_landmarks, q_len))
            k_means, no_keys = segment_means(k, hidden, min(self.num_landmarks, kv_len))
            k_means = k_means.repeat_interleave(heads // max(1, k.shape[1]), 1)
            left, right = NarrowSoftmax(q, k_means, no_keys, scale), NarrowSoftmax(q_means, k, hidden, scale)
            everything = slice(0, batch), slice(0, heads), range(q_means.shape[2])
            middle = NarrowSoftmax(q_means, k_means, no_keys, scale).weights(*everything)
            inner = pseudo_inverse(middle.masked_fill(no_rows[:, None, :, None], 0.0), self.iterations)
        return NystromMatrix(left, inner, right, dtype=inputs.query.dtype, padding_rows=tokens.padding_rows)

    def extra_repr(self) -> str:
        text = f"{self.num_landmarks}, iterations={self.iterations}"
        return text if self.scale is None else f"{text}, scale={self.scale}"


class NystromMatrix(LowRankMatrix):
    """The Nystrom matrix ``left @ inner @ right``, from queries through landmarks to keys.

    Args:
        left: attention from queries to key landmarks, ``[batch, heads, q_len, landmarks]``.
        inner: the pseudo-inverse, ``[batch, heads, landmarks, landmarks]``.
        right: attention from query landmarks to keys, ``[batch, heads, landmarks, kv_len]``.
        dtype: dtype of the inputs and of matrix products.
        padding_rows: bool ``[batch, q_len]``, True at padding.

    Cost: products take O((q_len + kv_len) * landmarks * width) time, and memory that is linear in the lengths.
    """

    def __init__(
        self, left: NarrowSoftmax, inner: Tensor, right: NarrowSoftmax, *, dtype: torch.dtype, padding_rows: Tensor
    ):
        super().__init__(left, right.key.shape[1], right.key.shape[2], dtype=dtype, padding_rows=padding_rows)
        self.inner, self.right = inner, right

    def _gathered(self, value: Tensor) -> Tensor:
        return self.inner @ self.right.times(value)

    def _scattered(self, x: Tensor) -> Tensor:
        return self.right.matrix().mT @ (self.inner.mT @ x)

    def _right(self, items: slice, heads: slice) -> Tensor:
        return self.inner[items, heads] @ self.right.weights(items, heads, range(self.inner.shape[2]))


def segment_means(x: Tensor, hidden: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the landmarks of the Nystrom method: means of (nearly) equal numbers of neighbouring tokens.

    Args:
        x: ``[batch, heads, len, width]``.
        hidden: bool ``[batch, len]``, True at tokens that the means exclude.
        count: largest number of means; an item with fewer tokens has one for each token.

    Returns:
        The means, ``[batch, heads, count, width]``, and which of them contain no token, bool ``[batch, count]``.
    """
    tokens = (~hidden).sum(1, keepdim=True)
    place = (~hidden).cumsum(1) - 1  # counts tokens only, so that padding does not change the means
    segment = torch.where(tokens > count, place * count // tokens.clamp(min=1), place)
    segment = segment.masked_fill(hidden, count)  # an extra segment for tokens to discard
    sums = x.new_zeros(*x.shape[:2], count + 1, x.shape[3])
    index = segment[:, None, :, None].expand_as(x)
    sums = sums.scatter_add(2, index, x.masked_fill(hidden[:, None, :, None], 0.0))
    sizes = torch.zeros(len(x), count + 1, dtype=x.dtype, device=x.device)
    sizes = sizes.scatter_add(1, segment, torch.ones_like(segment, dtype=x.dtype))[:, :count]
    return sums[:, :, :count] / sizes.clamp(min=1.0)[:, None, :, None], sizes == 0


def pseudo_inverse(matrix: Tensor, iterations: int | None) -> Tensor:
    r"""Return the Moore-Penrose inverse of the landmark matrices, exactly or by a fixed number of iterations.

    .. math:: Z_{k+1} = \tfrac14 Z_k (13 I - A Z_k (15 I - A Z_k (7 I - A Z_k))), \qquad
              Z_0 = A^\top / (\lVert A \rVert_1 \lVert A \rVert_\infty)

    In A·Z, a singular value σ of A starts as :math:`x = \sigma^2 / (\lVert A \rVert_1 \lVert A \rVert_\infty)`. Once x
    is near 1, every iteration roughly cubes its distance from 1. Small values start near 0 and grow by a factor of at
    most 13/4 per iteration. A few iterations are robust because they leave out small singular values; many iterations
    amplify rounding errors.

    Args:
        matrix: ``[..., rows, columns]``.
        iterations: number of iterations; None to compute the inverse exactly, from singular values.

    Cost: 4 matrix products in each iteration.

    Reference: Xiong et al. 2021, arXiv:2102.03902, section 3.3 and equation 14.
    """
    if iterations is None:
        is_nonfinite = ~matrix.detach().isfinite().all(-1).all(-1)[..., None, None]  # torch's pinv fails on NaN and inf
        return torch.linalg.pinv(matrix.masked_fill(is_nonfinite, 0.0)).masked_fill(is_nonfinite, torch.nan)
    if 0 in matrix.shape:
        return matrix.mT
    size = matrix.abs()
    bound = size.sum(-2).amax(-1) * size.sum(-1).amax(-1)
    bound = bound.masked_fill(bound == 0, 1.0)[..., None, None]
    inverse = matrix.mT / bound
    eye = torch.eye(matrix.shape[-2], dtype=matrix.dtype, device=matrix.device)
    for _ in range(iterations):
        near = matrix @ inverse
        inverse = inverse @ (13 * eye - near @ (15 * eye - near @ (7 * eye - near))) / 4
    return inverse
