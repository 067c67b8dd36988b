"""SSD: the state space of Mamba-2."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.mechanisms.recurrences.mechanism import Recurrence
from saccade.mechanisms.recurrences.recurrence_matrix import RecurrenceMatrix
from saccade.mechanisms.value_access import is_readable
from saccade.positions.token_positions import GivenPositions
from saccade.support.errors import value_error
from saccade.support.validation import check_int, check_type

__all__ = ["SSD"]


class SSD(Recurrence):
    r"""Mamba-2's state space: a step size for each token sets what is written and what fades.

    .. math:: S_t = \exp(\Delta_t a)\, S_{t-1} + \Delta_t B_t x_t^T, \qquad y_t = S_t^T C_t, \qquad
              A_{ij} = \Delta_j\, C_i \cdot B_j \exp \Big( a \sum_{t=j+1}^{i} \Delta_t \Big)

    C is the query, B the key, x the value; C and B may have fewer heads than x (Mamba-2's groups). The term D·x of a
    layer is no part of the matrix: add it.

    Args:
        num_heads: heads of the values.

    Attributes:
        log_rate: ``log(-a)``, trainable, ``[num_heads]``; starts at the logarithms of 1 to ``num_heads``, as Mamba-2's
            ``A_log`` does.

    Raises:
        ValueError: steps of another shape, or below 0.
        UnsupportedError: a mask other than Causal, Documents around it, and what hides keys alone (Padding).

    Cost: that of `GatedLinear`.

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
        """The matrix; ``step`` is Δ, at least 0, ``[batch, num_heads, kv_len]``; 1 when None."""
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
