"""Nystrom: softmax attention through landmarks."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.arguments import integer, number
from saccade.masks import Mask
from saccade.mechanisms.approximate import Approximate, Inputs, scale_of
from saccade.mechanisms.landmarks.matrix import LowRankMatrix
from saccade.mechanisms.landmarks.means import segment_means
from saccade.mechanisms.landmarks.narrow import NarrowSoftmax
from saccade.mechanisms.landmarks.pseudo_inverse import pseudo_inverse
from saccade.mechanisms.landmarks.tokens import Tokens, hidden_at, why_not_keys_only

__all__ = ["Nystrom", "NystromMatrix"]


class Nystrom(Approximate):
    r"""Approximates softmax attention through a few landmarks, the means of neighbouring tokens: linear time.

    .. math:: A \approx \mathrm{softmax}(Q \tilde K^\top)\, \mathrm{softmax}(\tilde Q \tilde K^\top)^{+}\,
              \mathrm{softmax}(\tilde Q K^\top)

    Exact with as many landmarks as tokens and the exact pseudo-inverse. With fewer it is exact where landmarks lose
    nothing: where neighbours within a segment are alike. Landmarks average over tokens that come later, so it is not
    causal. Rows may hold weights below 0.

    Args:
        num_landmarks: means of queries, and of keys; a shorter sequence has as many as tokens.
        iterations: steps towards the pseudo-inverse; None for the exact one, by singular values.
        scale: of the dot products; ``head_dim ** -0.5`` when None.

    The exact pseudo-inverse magnifies what landmarks lose, without limit where two of them are nearly alike; a few
    steps towards it do not. On queries and keys of unrelated neighbours neither is of use: `saccade.compare` says so.

    Padding is left out of the means: of keys always, of queries where they are as many as keys and stand where those
    do, so that what padding holds changes nothing.

    Raises:
        TypeError, ValueError: a count below 1, a scale that is no finite number.
        UnsupportedError: a mask that lets queries see different keys.

    Cost: O((q_len + kv_len) * num_landmarks * (head_dim + value_dim) + num_landmarks ** 3) time; memory linear in the
    lengths.

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
        self.num_landmarks = integer("Nystrom", "num_landmarks", num_landmarks)
        self.iterations = None if iterations is None else integer("Nystrom", "iterations", iterations)
        self.scale = None if scale is None else number("Nystrom", "scale", scale)

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        return why_not_keys_only(mask, "landmarks are means of tokens, some of which a query would not see")

    def _made(self, given: Inputs) -> NystromMatrix:
        batch, heads, q_len, kv_len = given.shape
        tokens = Tokens.of(given)
        q, k, hidden = tokens.query, tokens.key, tokens.hidden
        left_out = hidden_at(given, tokens.rows) if q_len == kv_len else tokens.lost
        scale = scale_of(self.scale, given.query.shape[3])
        with torch.autocast(given.query.device.type, enabled=False):
            q_means, no_rows = segment_means(q, left_out, min(self.num_landmarks, q_len))
            k_means, no_keys = segment_means(k, hidden, min(self.num_landmarks, kv_len))
            k_means = k_means.repeat_interleave(heads // max(1, k.shape[1]), 1)
            left, right = NarrowSoftmax(q, k_means, no_keys, scale), NarrowSoftmax(q_means, k, hidden, scale)
            everything = slice(0, batch), slice(0, heads), range(q_means.shape[2])
            middle = NarrowSoftmax(q_means, k_means, no_keys, scale).weights(*everything)
            inner = pseudo_inverse(middle.masked_fill(no_rows[:, None, :, None], 0.0), self.iterations)
        return NystromMatrix(left, inner, right, dtype=given.query.dtype, lost=tokens.lost)

    def extra_repr(self) -> str:
        own = f"{self.num_landmarks}, iterations={self.iterations}"
        return own if self.scale is None else f"{own}, scale={self.scale}"


class NystromMatrix(LowRankMatrix):
    """``left @ inner @ right``: queries by landmarks, landmarks by landmarks, landmarks by keys.

    Args:
        left: queries over the keys' landmarks, ``[batch, heads, q_len, landmarks]``.
        inner: ``[batch, heads, landmarks, landmarks]``, the pseudo-inverse.
        right: the queries' landmarks over the keys, ``[batch, heads, landmarks, kv_len]``.
        dtype: of the inputs and of the products.
        lost: bool ``[batch, q_len]``, rows where no token stands.

    Cost: products take O((q_len + kv_len) * landmarks * width) time and memory linear in the lengths.
    """

    def __init__(self, left: NarrowSoftmax, inner: Tensor, right: NarrowSoftmax, *, dtype: torch.dtype, lost: Tensor):
        super().__init__(left, right.key.shape[1], right.key.shape[2], dtype=dtype, lost=lost)
        self.inner, self.right = inner, right

    def _gathered(self, value: Tensor) -> Tensor:
        return self.inner @ self.right.times(value)

    def _scattered(self, x: Tensor) -> Tensor:
        return self.right.matrix().mT @ (self.inner.mT @ x)

    def _right(self, items: slice, heads: slice) -> Tensor:
        return self.inner[items, heads] @ self.right.weights(items, heads, range(self.inner.shape[2]))
