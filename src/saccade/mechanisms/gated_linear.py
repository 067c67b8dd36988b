"""GatedLinear, Delta and SSD: linear attention whose state decays or is corrected by new tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.mechanisms.checked_mechanism import Inputs
from saccade.mechanisms.readable_tensors import is_readable
from saccade.mechanisms.recurrences.mechanism import GatedRecurrence, Recurrence
from saccade.mechanisms.recurrences.recurrence_matrix import RecurrenceMatrix
from saccade.positions.token_positions import GivenPositions
from saccade.support.errors import value_error
from saccade.support.validation import check_int, check_type, register_tensor


class GatedLinear(GatedRecurrence):
    r"""Linear attention with a decaying state: the weight of a token decreases with every later token.

    .. math:: S_t = \mathrm{diag}(\exp g_t)\, S_{t-1} + \beta_t k_t v_t^T, \qquad o_t = s\, S_t^T q_t, \qquad
              A_{ij} = s\, \beta_j \sum_c q_{ic} k_{jc} \exp \Big( \sum_{t=j+1}^{i} g_{tc} \Big)

    Many models use this rule. Without gates, it is linear attention without a denominator. With a constant decay for
    each head, it is RetNet's retention (`retnet`) or lightning attention (`lightning`). With a decay for each token, it
    is Mamba-2 (see `SSD`), and with one for each channel of each token, gated linear attention (GLA). In the ONNX
    operator LinearAttention, these are the update rules "linear" and "gated".

    Args:
        decay: g for each head, at most 0, ``[heads]``; None for no decay. A call may pass a decay for each token
            instead.
        scale: s; ``head_dim ** -0.5`` when None.

    Raises:
        ValueError: a decay is above 0 or has the wrong shape.
        UnsupportedError: any mask except Causal or Causal within Documents, each alone or combined with masks that
            depend only on keys (Padding).

    Cost: O(n * head_dim * value_dim) time and O(n * head_dim) memory; see `saccade.matrix.Matrix`. For decoding, a
    `saccade.caches.RecurrentCache` stores a state with ``head_dim * value_dim`` elements per head.

    Example:
        >>> import torch
        >>> from saccade.masks import Causal
        >>> query = key = torch.ones(1, 1, 4, 4)
        >>> half = torch.full((1, 1, 4), 0.5).log()
        >>> GatedLinear(scale=0.25)(query, key, decay=half, mask=Causal())[0, 0]
        tensor([[1.0000, 0.0000, 0.0000, 0.0000],
                [0.5000, 1.0000, 0.0000, 0.0000],
                [0.2500, 0.5000, 1.0000, 0.0000],
                [0.1250, 0.2500, 0.5000, 1.0000]])

    Reference: Yang et al. 2024, arXiv:2312.06635 (GLA); Sun et al. 2023, arXiv:2307.08621 (RetNet); Qin et al. 2024,
    arXiv:2401.04658 (lightning attention).
    """

    decay: Tensor | None

    def __init__(self, decay: Tensor | None = None, *, scale: float | None = None):
        super().__init__(scale=scale)
        if decay is not None:
            check_type("decay", decay, Tensor, "be a tensor [heads]")
            if decay.dim() != 1 or not decay.is_floating_point() or (not decay.is_meta and bool((decay > 0).any())):
                got = f"{list(decay.shape)}, at most {float(decay.max()):.3g}" if decay.numel() else "nothing"
                raise value_error("decay", "be a float tensor [heads] with values of at most 0", got)
        register_tensor(self, "decay", decay)

    @classmethod
    def retnet(cls, num_heads: int) -> GatedLinear:
        """Return RetNet's retention: gated linear attention with a constant decay for each head.

        At each token, a head's state decays by a factor between ``1 - 2 ** -5`` and ``1 - 2 ** -(4 + num_heads)``. As
        in RetNet, rotate queries and keys beforehand (`saccade.positions.Rotary`).
        """
        heads = torch.arange(check_int("num_heads", num_heads), dtype=torch.float64)
        return cls(torch.log1p(-(2.0 ** (-5.0 - heads))))

    @classmethod
    def lightning(cls, num_heads: int, layer: int = 0, num_layers: int = 1) -> GatedLinear:
        """Return MiniMax's lightning attention: unscaled linear attention with decays proportional to ALiBi's slopes.

        Args:
            num_heads: a power of two.
            layer, num_layers: index of the layer, from 0, and number of layers. Later layers decay more slowly.
        """
        check_int("num_layers", num_layers)
        check_int("layer", layer, 0, below=num_layers)
        base = 1.0 / 2.0 ** (8.0 / check_int("num_heads", num_heads))
        rates = base ** (torch.arange(num_heads, dtype=torch.float64) + 1.0)
        return cls(-rates * (1.0 - layer / (num_layers - 1 + 1e-5) + 1e-5), scale=1.0)

    def _matrix(self, inputs: Inputs, decay: Tensor | None, beta: Tensor | None) -> RecurrenceMatrix:
        if decay is None and self.decay is not None:
            batch, _, _, length = inputs.shape
            decay = self.decay[None, :, None].to(inputs.wide).expand(batch, -1, length)
        return super()._matrix(inputs, decay, beta)


class Delta(GatedRecurrence):
    r"""The delta rule: linear attention in which new tokens correct the state instead of only adding to it.

    .. math:: S_t = D_t S_{t-1} + \beta_t k_t \big( v_t - (D_t S_{t-1})^T k_t \big)^T, \qquad o_t = s\, S_t^T q_t

    .. math:: A = s\, L(Q, K)\, \big( I + \mathrm{diag}(\beta)\, L(K, K)_{<} \big)^{-1} \mathrm{diag}(\beta), \qquad
              L(X, K)_{ij} = \sum_c x_{ic} k_{jc} \exp \Big( \sum_{t=j+1}^{i} g_{tc} \Big), \; j \le i

    Without a decay, this is DeltaNet. With a decay for each token, it is Gated DeltaNet, and with one for each channel
    of each token, Kimi Delta Attention. In the ONNX operator LinearAttention, these are the update rules "delta" and
    "gated_delta".

    Keys should have norm 1. The state stays bounded if :math:`\beta_t |k_t|^2 \le 2`; if not, it may grow without
    bound. Keys are not normalised here; use ``torch.nn.functional.normalize(key, dim=-1)``.

    Args:
        scale: s; ``head_dim ** -0.5`` when None.

    Raises:
        ValueError: a gate has the wrong shape, or a decay is above 0.
        UnsupportedError: any mask except Causal or Causal within Documents, each alone or combined with masks that
            depend only on keys (Padding).

    Cost: as for `GatedLinear`, plus solving a triangular system for each chunk of 32 tokens.

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


class SSD(Recurrence):
    r"""Mamba-2's state space, in which each token's step size sets how much it writes and how much the state decays.

    .. math:: S_t = \exp(\Delta_t a)\, S_{t-1} + \Delta_t B_t x_t^T, \qquad y_t = S_t^T C_t, \qquad
              A_{ij} = \Delta_j\, C_i \cdot B_j \exp \Big( a \sum_{t=j+1}^{i} \Delta_t \Big)

    C is the query, B the key and x the value. C and B may have fewer heads than x (Mamba-2's groups). The layer's term
    D·x is not part of the matrix; add it separately.

    Args:
        num_heads: number of value heads.

    Attributes:
        log_rate: ``log(-a)``, trainable, ``[num_heads]``; initialised to the logarithms of 1 to ``num_heads``, like
            Mamba-2's ``A_log``.

    Raises:
        ValueError: a step size is below 0, or the step sizes have the wrong shape.
        UnsupportedError: any mask except Causal or Causal within Documents, each alone or combined with masks that
            depend only on keys (Padding).

    Cost: as for `GatedLinear`.

    Example:
        >>> import torch
        >>> from saccade.masks import Causal
        >>> read = written = torch.ones(1, 1, 3, 1)
        >>> SSD(1)(read, written, step=torch.full((1, 1, 3), 0.5), mask=Causal())[0, 0, 2].detach()
        tensor([0.1839, 0.3033, 0.5000])

    Reference: Dao and Gu 2024, arXiv:2405.21060.
    """

    def __init__(self, num_heads: int):
        super().__init__(scale=1.0)
        self.log_rate = nn.Parameter(torch.arange(1.0, check_int("num_heads", num_heads) + 1.0).log())

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        step: Tensor | None = None,
        mask: object = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> RecurrenceMatrix:
        """Return the matrix of Mamba-2 for step sizes Δ, at least 0, ``[batch, num_heads, kv_len]``; None for 1."""
        inputs = self._inputs(query, key, mask, q_positions, kv_positions)
        batch, _, _, length = inputs.shape
        if step is None:
            step = query.new_ones(batch, len(self.log_rate), length)
        check_type("step", step, Tensor, "be a tensor [batch, num_heads, kv_len]")
        expected = (batch, len(self.log_rate), length)
        if step.shape != expected:
            raise value_error("step", f"have shape {list(expected)}", list(step.shape))
        if is_readable(step) and step.numel() and bool((step < 0).any()):
            hint = "for instance softplus(x)"
            raise value_error("step", "be at least 0", f"{float(step.min()):.3g}", hint=hint)
        return self._matrix(inputs, -step * self.log_rate.exp()[:, None].to(step), step)
