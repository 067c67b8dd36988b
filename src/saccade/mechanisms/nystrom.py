"""Nystrom: softmax attention through landmarks."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine.at_positions import GivenPositions
from saccade.masks import Mask
from saccade.mechanisms.base import Mechanism
from saccade.mechanisms.checks import check_count, checked_inputs, checked_scale
from saccade.mechanisms.nystrom_matrix import NystromMatrix
from saccade.mechanisms.pseudo_inverse import pseudo_inverse
from saccade.mechanisms.reach import written_out
from saccade.mechanisms.readable import unless_none
from saccade.mechanisms.segments import hidden_keys, segment_means, why_not_keys_only
from saccade.mechanisms.thin import Thin

__all__ = ["Nystrom"]


class Nystrom(Mechanism):
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
        self.num_landmarks = check_count("Nystrom", "num_landmarks", num_landmarks)
        self.iterations = None if iterations is None else check_count("Nystrom", "iterations", iterations)
        self.scale = checked_scale("Nystrom", scale)

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        return why_not_keys_only(mask, "landmarks are means of tokens, some of which a query would not see")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: object = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> NystromMatrix:
        given = checked_inputs(self, query, key, mask, q_positions, kv_positions)
        batch, heads, q_len, kv_len = given.shape
        rows, keys, is_given = written_out(given.q_positions, given.kv_positions, q_len, kv_len, query.device)
        hidden = hidden_keys(given.rule, keys, batch, is_given=is_given)
        lost = ((rows < 0) & is_given).expand(batch, -1)
        left_out = hidden_keys(given.rule, rows, batch, is_given=is_given) if q_len == kv_len else lost
        scale = (query.shape[3] ** -0.5 if query.shape[3] else 1.0) if self.scale is None else self.scale
        # What is not finite is not kept apart: every row sees every key, and all means.
        q = query.to(given.query.dtype).masked_fill(lost[:, None, :, None], 0.0)
        k = key.to(given.key.dtype).masked_fill(hidden[:, None, :, None], 0.0)
        with torch.autocast(query.device.type, enabled=False):
            q_means, no_rows = segment_means(q, left_out, min(self.num_landmarks, q_len))
            k_means, no_keys = segment_means(k, hidden, min(self.num_landmarks, kv_len))
            k_means = k_means.repeat_interleave(heads // max(1, k.shape[1]), 1)
            left, right = Thin(q, k_means, no_keys, scale), Thin(q_means, k, hidden, scale)
            everything = slice(0, batch), slice(0, heads), range(q_means.shape[2])
            middle = Thin(q_means, k_means, no_keys, scale).weights(*everything)
            inner = pseudo_inverse(middle.masked_fill(no_rows[:, None, :, None], 0.0), self.iterations)
        return NystromMatrix(left, inner, right, dtype=given.dtype, lost=unless_none(lost))

    def extra_repr(self) -> str:
        own = f"{self.num_landmarks}, iterations={self.iterations}"
        return own if self.scale is None else f"{own}, scale={self.scale}"
