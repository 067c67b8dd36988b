"""Delta: a token writes what its key does not yet recall."""

from __future__ import annotations

from saccade.mechanisms.recurrences.mechanism import GatedRecurrence

__all__ = ["Delta"]


class Delta(GatedRecurrence):
    r"""The delta rule: a state of keys and values that is corrected, not only added to.

    .. math:: S_t = D_t S_{t-1} + \beta_t k_t \big( v_t - (D_t S_{t-1})^T k_t \big)^T, \qquad o_t = s\, S_t^T q_t

    .. math:: A = s\, L(Q, K)\, \big( I + \mathrm{diag}(\beta)\, L(K, K)_{<} \big)^{-1} \mathrm{diag}(\beta), \qquad
              L(X, K)_{ij} = \sum_c x_{ic} k_{jc} \exp \Big( \sum_{t=j+1}^{i} g_{tc} \Big), \; j \le i

    Without a decay DeltaNet; with one for each token Gated DeltaNet, with one for each channel Kimi Delta Attention.
    These are the update rules "delta" and "gated_delta" of the ONNX operator LinearAttention.

    Keys should have length 1: the state stays bounded where :math:`\beta_t |k_t|^2 \le 2`, and may grow without bound
    where not. Nothing is normalised here: ``torch.nn.functional.normalize(key, dim=-1)``.

    Args:
        scale: s; ``head_dim ** -0.5`` when None.

    Raises:
        ValueError: gates of another shape, or a decay above 0.
        UnsupportedError: a mask other than Causal, Documents around it, and what hides keys alone (Padding).

    Cost: that of `GatedLinear`, and a triangular system of 32 tokens for each chunk.

    Example:
        >>> import torch
        >>> from saccade.masks import Causal
        >>> key = torch.eye(2)[[0, 1, 0]][None, None]  # the third token writes where the first did
        >>> Delta(scale=1.0)(key, key, beta=torch.ones(1, 1, 3), mask=Causal())[0, 0]
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]])

    Reference: Yang et al. 2024, arXiv:2406.06484 (parallel form); Yang et al. 2025, arXiv:2412.06464 (gated); Kimi Team
    2025, arXiv:2510.26692 (a decay for each channel).
    """

    is_delta = True
