"""GatedDelta2: the gated delta rule with separate gates for what a token erases and what it writes."""

from __future__ import annotations

from torch import Tensor

from saccade.mechanisms.recurrences.mechanism import Recurrence, check_gate_of_channels, finite_product
from saccade.mechanisms.recurrences.recurrence_matrix import RecurrenceMatrix
from saccade.positions.token_positions import GivenPositions


class GatedDelta2(Recurrence):
    r"""The gated delta rule of Gated DeltaNet-2, in which each channel of a key has its own strength of erasure.

    .. math:: S_t = (I - k_t (b_t \odot k_t)^T)\, D_t S_{t-1} + k_t (w_t \odot v_t)^T, \qquad o_t = s\, S_t^T q_t,
              \qquad D_t = \mathrm{diag}(\exp g_t)

    The write gate w multiplies values, so it is not part of the matrix: compute ``A @ (write * value)``. If all
    channels of both gates are equal, this is `Delta`, with that gate as ``beta``.

    Keys should have norm 1, and the erase gate b should be between 0 and 1 (or 0 and 2). Keys are not normalised here;
    use ``torch.nn.functional.normalize(key, dim=-1)``. Even then, unlike the state of `Delta`, the state may grow: if
    the channels of b differ, a token reads the state in a different direction from the one that it corrects, and two
    alternating tokens can multiply the state by 1.2. A decay limits this growth.

    Args:
        scale: s; ``head_dim ** -0.5`` when None.

    Raises:
        ValueError: a gate has the wrong shape, or a decay is above 0.
        UnsupportedError: any mask except Causal or Causal within Documents, each alone or combined with masks that
            depend only on keys (Padding).

    Cost: the same as for `Delta`.

    Example:
        >>> import torch
        >>> from saccade.masks import Causal
        >>> key = torch.eye(2)[[0, 1, 0, 1]][None, None]  # the last two tokens write where the first two did
        >>> erase = torch.tensor([0.5, 1.0]).expand(1, 1, 4, 2)
        >>> GatedDelta2(scale=1.0)(key, key, erase=erase, mask=Causal())[0, 0]
        tensor([[1.0000, 0.0000, 0.0000, 0.0000],
                [0.0000, 1.0000, 0.0000, 0.0000],
                [0.5000, 0.0000, 1.0000, 0.0000],
                [0.0000, 0.0000, 0.0000, 1.0000]])

    Reference: Hatamizadeh et al. 2026, arXiv:2605.22791.
    """

    is_delta = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        decay: Tensor | None = None,
        erase: Tensor | None = None,
        mask: object = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> RecurrenceMatrix:
        """Return the matrix of the gated delta rule for the queries, keys and gates of one call.

        Args:
            query: ``[batch, heads, q_len, head_dim]``.
            key: ``[batch, key_heads, kv_len, head_dim]``.
            decay: g, as in `GatedLinear`.
            erase: b, with the shape of ``key``; None for 1.
            mask, q_positions, kv_positions: as in `GatedLinear`.

        Raises:
            ValueError: a gate has the wrong shape, or a decay is above 0.
            UnsupportedError: a mask that is not causal, or tokens that are not in order.
        """
        check_gate_of_channels("erase", erase, key)
        inputs = self._inputs(query, key, mask, q_positions, kv_positions)
        recall = None if erase is None else finite_product(erase.to(inputs.wide), key.to(inputs.wide))
        return self._recurrence(inputs, decay, None, recall)
