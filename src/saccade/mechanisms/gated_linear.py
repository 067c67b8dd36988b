"""GatedLinear: sums over earlier tokens that fade."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.mechanisms.checked_mechanism import Inputs
from saccade.mechanisms.recurrences.mechanism import GatedRecurrence
from saccade.mechanisms.recurrences.recurrence_matrix import RecurrenceMatrix
from saccade.support.errors import value_error
from saccade.support.validation import check_int, check_type, register_tensor

__all__ = ["GatedLinear"]


class GatedLinear(GatedRecurrence):
    r"""Linear attention whose state fades: what a token has written counts less with every token that follows.

    .. math:: S_t = \mathrm{diag}(\exp g_t)\, S_{t-1} + \beta_t k_t v_t^T, \qquad o_t = s\, S_t^T q_t, \qquad
              A_{ij} = s\, \beta_j \sum_c q_{ic} k_{jc} \exp \Big( \sum_{t=j+1}^{i} g_{tc} \Big)

    One rule under many names. Without gates it is linear attention without a denominator; with a constant for each head
    RetNet's retention (`retnet`) and lightning attention (`lightning`); with a decay of each token gated linear
    attention (one for each channel: GLA), and Mamba-2, for which there is `SSD`. These are the update rules "linear"
    and "gated" of the ONNX operator LinearAttention.

    Args:
        decay: g of each head, at most 0, ``[heads]``; a call may bring that of each token instead. None for none.
        scale: s; ``head_dim ** -0.5`` when None.

    Raises:
        ValueError: a decay above 0, or of another shape.
        UnsupportedError: a mask other than Causal, Documents around it, and what hides keys alone (Padding).

    Cost: O(n * head_dim * value_dim) time and O(n * head_dim) memory; see `saccade.matrix.Matrix`. Decoding takes a
    state of ``head_dim * value_dim`` numbers a head: `saccade.caches.RecurrentCache`.

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
                raise value_error("decay", "be floats [heads] of at most 0", got)
        register_tensor(self, "decay", decay)

    @classmethod
    def retnet(cls, num_heads: int) -> GatedLinear:
        """Retention: factors of ``1 - 2 ** -5`` to ``1 - 2 ** -(4 + num_heads)``.

        Queries and keys are to be rotated before, as RetNet has it (`saccade.positions.Rotary`).
        """
        heads = torch.arange(check_int("num_heads", num_heads), dtype=torch.float64)
        return cls(torch.log1p(-(2.0 ** (-5.0 - heads))))

    @classmethod
    def lightning(cls, num_heads: int, layer: int = 0, num_layers: int = 1) -> GatedLinear:
        """Lightning attention of MiniMax: rates of ALiBi's slopes, smaller in later layers; no scale.

        Args:
            num_heads: a power of two.
            layer, num_layers: which layer, from 0, of how many.
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
