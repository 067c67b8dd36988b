"""DeltaProduct: the delta rule with several steps for each token."""

from __future__ import annotations

from torch import Tensor

from saccade.mechanisms.checked_mechanism import Inputs
from saccade.mechanisms.features.mask_support import Visible
from saccade.mechanisms.recurrences.mechanism import Recurrence, checked_gate
from saccade.mechanisms.recurrences.substeps import SubstepMatrix, expand_mask, to_first_substep, to_last_substep
from saccade.positions.token_positions import GivenPositions
from saccade.support.errors import describe, value_error
from saccade.support.validation import check_int


class DeltaProduct(Recurrence):
    r"""The delta rule with several corrections of the state for each token, before the token reads it.

    .. math:: S_{t,0} = D_t S_{t-1,n}, \qquad
              S_{t,i} = S_{t,i-1} + \beta_{t,i} k_{t,i} \big( v_{t,i} - S_{t,i-1}^T k_{t,i} \big)^T, \qquad
              o_t = s\, S_{t,n}^T q_t

    The state transition of a token is a product of n Householder matrices. With :math:`\beta = 2`, it can permute the
    contents of the state, and with two steps also rotate them. A single step is `Delta`. Without a decay, this is
    DeltaProduct; with a decay, Gated DeltaProduct. Keys should have norm 1, and :math:`0 \le \beta \le 2`.

    Rows and columns of the matrix are tokens. For each step of each head, the matrix has a separate head, which weights
    the values of that step. The output is the sum over the steps. ``A.total(value)`` computes it in one pass, as caches
    do, from the values of all steps side by side.

    Args:
        num_steps: n, the number of steps for each token.
        scale: s; ``head_dim ** -0.5`` when None.

    Raises:
        ValueError: keys or gates have the wrong shape, or a decay is above 0.
        UnsupportedError: any mask except Causal or Causal within Documents, each alone or combined with masks that
            depend only on keys (Padding).

    Cost: `total` and decoding take as long as `Delta` with n times as many tokens, and the matrix takes n times as
    long. The state has ``head_dim * value_dim`` elements per head for any n.

    Example:
        >>> import torch
        >>> from saccade.masks import Causal
        >>> query, key, value = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 3 * 4), torch.randn(1, 2, 5, 3 * 4)
        >>> A = DeltaProduct(3)(query, torch.nn.functional.normalize(key, dim=-1), mask=Causal())
        >>> A.shape, A.total(value).shape
        ((1, 6, 5, 5), torch.Size([1, 2, 5, 4]))
        >>> each = value.unflatten(3, (3, 4)).transpose(2, 3).flatten(1, 2)
        >>> torch.allclose((A @ each).unflatten(1, (2, 3)).sum(2), A.total(value), atol=1e-6)
        True

    Reference: Siems et al. 2025, arXiv:2502.10297, sections 3 and 4.
    """

    is_delta = True

    def __init__(self, num_steps: int = 2, *, scale: float | None = None):
        super().__init__(scale=scale)
        self.num_steps = check_int("num_steps", num_steps)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        decay: Tensor | None = None,
        beta: Tensor | None = None,
        mask: object = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> SubstepMatrix:
        """Return the matrix of DeltaProduct for the queries, keys and gates of one call.

        Args:
            query: ``[batch, heads, q_len, head_dim]``.
            key: ``[batch, kv_heads, kv_len, num_steps * head_dim]``, the keys of all steps side by side.
            decay: log decay of the state before the first step of each token, at most 0: ``[batch, kv_heads, kv_len]``,
                or ``[batch, kv_heads, kv_len, head_dim]`` for one per channel. None for no decay.
            beta: strength with which each step is written, ``[batch, kv_heads, kv_len, num_steps]``; None for 1.
            mask, q_positions, kv_positions: as in `GatedLinear`.

        Raises:
            ValueError: keys or gates have the wrong shape, or a decay is above 0.
            UnsupportedError: a mask that is not causal, or tokens out of order.
        """
        width = query.shape[-1]
        if key.dim() != 4 or key.shape[3] != self.num_steps * width:
            rule = f"have shape [batch, kv_heads, kv_len, {self.num_steps} * {width}]"
            raise value_error("key", rule, list(key.shape), facts=[describe("query", query)])
        inputs = self._inputs(query, key[..., :width], mask, q_positions, kv_positions)
        decay = None if decay is None else checked_gate("decay", decay, inputs)
        whole = (*key.shape[:3], self.num_steps)
        if beta is not None and beta.shape != whole:
            raise value_error("beta", f"have shape {list(whole)}", list(beta.shape), facts=[describe("key", key)])
        return self._substep_matrix(inputs, key, decay, None if beta is None else beta.flatten(2, 3))

    def _matrix_of(self, inputs: Inputs) -> SubstepMatrix:  # type: ignore[override]  # not a RecurrenceMatrix
        return self._substep_matrix(inputs, inputs.key.repeat(1, 1, 1, self.num_steps), None, None)

    def _substep_matrix(self, inputs: Inputs, key: Tensor, decay: Tensor | None, beta: Tensor | None) -> SubstepMatrix:
        steps, (batch, heads, q_len, kv_len) = self.num_steps, inputs.shape
        visible = Visible.of(inputs)
        each = inputs._replace(
            query=to_last_substep(inputs.query, steps),
            key=key.to(inputs.key.dtype).unflatten(3, (steps, -1)).flatten(2, 3),
            shape=(batch, heads, q_len * steps, kv_len * steps),
        )
        decay = None if decay is None else to_first_substep(decay, steps)
        whole = self._recurrence(each, decay, beta, visible=expand_mask(visible, steps))
        return SubstepMatrix(whole, visible, steps, steps)

    def extra_repr(self) -> str:
        return f"{self.num_steps}, scale={self.scale}"
