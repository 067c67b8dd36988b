"""RWKV7: a delta rule that removes with one key and writes with another, with a decay and a rate for each channel."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.mechanisms.checked_mechanism import Inputs
from saccade.mechanisms.features.mask_support import Visible
from saccade.mechanisms.readable_tensors import is_readable
from saccade.mechanisms.recurrences.mechanism import (
    Recurrence,
    check_gate_of_channels,
    checked_gate,
    clean,
    finite_product,
)
from saccade.mechanisms.recurrences.substeps import SubstepMatrix, expand_mask, to_last_substep
from saccade.positions.token_positions import GivenPositions
from saccade.support.errors import value_error

MIN_LOG_DECAY = -30.0
"""The lowest log decay. Removals are first divided by the decay, and the quotient must stay far from overflow."""


class RWKV7(Recurrence):
    r"""RWKV-7's generalised delta rule: each channel of the state has its own decay and its own rate of correction.

    .. math:: S_t = \mathrm{diag}(\exp g_t)\, S_{t-1} - (a_t \odot \kappa_t)\, (S_{t-1}^T \kappa_t)^T + k_t v_t^T,
              \qquad o_t = s\, S_t^T q_t

    The query is RWKV's receptance r, κ the removal key, a the in-context learning rate and k the replacement key. The
    terms r·k that RWKV adds to the output are not part of the matrix. Each token takes two substeps of one recurrence:
    one that removes and one that decays and writes.

    The removal keys should have norm 1, and rates should be at most 1. Otherwise, the state may grow without bound.
    Nothing is normalised here; use ``torch.nn.functional.normalize(removal, dim=-1)``.

    Args:
        scale: s; by default 1, as in RWKV.

    Raises:
        ValueError: a gate has the wrong shape, or a log decay is not between -30 and 0.
        UnsupportedError: any mask except Causal or Causal within Documents, each alone or combined with masks that
            depend only on keys (Padding).

    Cost: as for `Delta` with a decay for each channel and twice as many tokens.

    Example:
        >>> from saccade.masks import Causal
        >>> key = torch.eye(2)[[0, 1, 0, 1]][None, None]  # the third token removes and replaces what the first wrote
        >>> half = torch.full((1, 1, 4, 2), 0.5)
        >>> RWKV7()(key, key, removal=key, rate=half, mask=Causal())[0, 0]
        tensor([[1.0000, 0.0000, 0.0000, 0.0000],
                [0.0000, 1.0000, 0.0000, 0.0000],
                [0.5000, 0.0000, 1.0000, 0.0000],
                [0.0000, 0.5000, 0.0000, 1.0000]])

    Reference: Peng et al. 2025, arXiv:2503.14456, section 4.
    """

    is_delta = True

    def __init__(self, *, scale: float = 1.0):
        super().__init__(scale=scale)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        decay: Tensor | None = None,
        removal: Tensor | None = None,
        rate: Tensor | None = None,
        mask: object = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> SubstepMatrix:
        """Return RWKV-7's matrix for the receptances, keys and gates of one call.

        Args:
            query: the receptance, ``[batch, heads, q_len, head_dim]``.
            key: the replacement keys, ``[batch, kv_heads, kv_len, head_dim]``.
            decay: g, from -30 to 0, ``[batch, kv_heads, kv_len]``, or ``[batch, kv_heads, kv_len, head_dim]`` for one
                per channel; None for 0.
            removal: κ, with the shape of ``key``; the keys themselves when None.
            rate: a, with the shape of ``key``; 1 when None.
            mask, q_positions, kv_positions: as in `GatedLinear`.

        Raises:
            ValueError: a gate has the wrong shape, or a log decay is not between -30 and 0.
            UnsupportedError: a mask that is not causal, or tokens out of order.
        """
        check_gate_of_channels("removal", removal, key)
        check_gate_of_channels("rate", rate, key)
        inputs = self._inputs(query, key, mask, q_positions, kv_positions)
        if decay is not None:
            if is_readable(decay) and decay.numel() and bool((decay < MIN_LOG_DECAY).any()):
                hint = "RWKV-7 has -exp(-0.5) * sigmoid(x)"
                raise value_error("decay", f"be at least {MIN_LOG_DECAY:g}", f"{float(decay.min()):.3g}", hint=hint)
            decay = checked_gate("decay", decay, inputs)
        return self._substep_matrix(inputs, decay, removal, rate)

    def _matrix_of(self, inputs: Inputs) -> SubstepMatrix:  # type: ignore[override]  # not a RecurrenceMatrix
        return self._substep_matrix(inputs, None, None, None)

    def _substep_matrix(
        self, inputs: Inputs, decay: Tensor | None, removal: Tensor | None, rate: Tensor | None
    ) -> SubstepMatrix:
        key, (batch, heads, q_len, kv_len) = inputs.key.to(inputs.wide), inputs.shape
        removal = key if removal is None else removal.to(inputs.wide)
        removed = removal if rate is None else finite_product(removal, rate.to(inputs.wide))
        if decay is not None:  # the decay of the second substep also applies to what the first one removes
            removed = finite_product(removed, (-clean(decay, inputs.wide)).exp().expand_as(removed))
            decay = to_last_substep(decay, 2)
        visible = Visible.of(inputs)
        each = inputs._replace(
            query=to_last_substep(inputs.query, 2),
            key=torch.stack([removed, key], 3).flatten(2, 3),
            shape=(batch, heads, q_len * 2, kv_len * 2),
        )
        recall = torch.stack([removal, torch.zeros_like(removal)], 3).flatten(2, 3)
        whole = self._recurrence(each, decay, None, recall, expand_mask(visible, 2))
        return SubstepMatrix(whole, visible, 2, 1)
