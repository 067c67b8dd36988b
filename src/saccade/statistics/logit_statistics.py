"""What the weights of a row tell about its scores: the largest one, and how much they vary."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from saccade.statistics.fold import Outline
from saccade.statistics.fused_sweep import Quantity
from saccade.statistics.per_row import PerRow, Placing, RowState
from saccade.statistics.row_block import Block, as_slice
from saccade.support.errors import unsupported, value_error
from saccade.support.validation import check_type

__all__ = ["LargestLogit", "LogitVariance"]


@dataclasses.dataclass(frozen=True)
class LogitVariance(PerRow):
    r"""Variance of a query's scores under its own attention, ``[batch, heads, q_len]``, in nats².

    .. math:: \mathrm{Var}_i = \sum_j A_{ij} (\log A_{ij} + H_i)^2 = -\frac{\partial H_i}{\partial \beta}
              \quad \text{at } \beta = 1

    Scores and log weights differ by a constant within a row, so the variance is that of both. It says how fast the
    entropy falls when all scores are scaled up; 0 when all visible keys share evenly, and when one takes everything.
    A row that attends to nothing has 0.

    Cost: about five operations per weight; O(q_len) memory.

    Raises:
        UnsupportedError: asked of a matrix whose rows are not distributions.
    """

    needs_distributions = True

    def of_rows(self, block: Block, placing: Placing) -> Tensor:
        # Centred first: of squares of logs, which may be 100, little would be left in float32.
        centred = (block.logs + block.entropy[..., None]).square_()
        return torch.linalg.vecdot(block.weights, centred)

    def quantity(self, placing: Placing) -> Quantity | None:
        return "variance"


@dataclasses.dataclass(frozen=True, eq=False)
class LargestLogit(PerRow):
    r"""The largest score of each row, after scale, softcap, bias and mask, ``[batch, heads, q_len]``.

    .. math:: \max_j s_{ij} = \max_j \log A_{ij} + L_i

    with L the log-sum-exp of the scores. Training diverges where these grow without bound; they are what QK clipping
    and logit softcaps limit. A row that attends to nothing has -inf.

    Args:
        lse: ``[batch, heads, q_len]``, where it is known from elsewhere; that of the matrix's own softmax when None.

    Raises:
        TypeError: ``lse`` is no tensor.
        ValueError: it does not fit the matrix.
        UnsupportedError: none is given, and the matrix is no softmax of scores.

    Cost: one comparison per weight; O(q_len) memory.

    Example:
        >>> from saccade import AttentionMatrix
        >>> q, k = torch.tensor([2.0, -1.0])[None, None, :, None], torch.tensor([1.0, 3.0])[None, None, :, None]
        >>> A = AttentionMatrix(q, k, scale=1.0)
        >>> A.ask(LargestLogit())[0]
        tensor([[[ 6., -1.]]])
    """

    lse: Tensor | None = None

    def __post_init__(self) -> None:
        check_type("lse", self.lse, (Tensor, type(None)), "be a tensor or None", hint="A.lse is one")

    def of_nothing(self, outline: Outline) -> Tensor:
        if self.lse is not None and self.lse.shape != outline.shape[:3]:
            raise value_error("lse", f"be {list(outline.shape[:3])}", list(self.lse.shape))
        return super().of_nothing(outline).fill_(-math.inf)

    def of_rows(self, block: Block, placing: Placing) -> Tensor:
        lse = block.lse
        if self.lse is not None:
            lse = self.lse.detach()[block.batch, block.heads, as_slice(block.rows)].to(block.weights.dtype)
        if lse is None:
            reason = "its weights are no softmax of scores, so no denominators are known"
            raise unsupported("this matrix", [reason], hint="LargestLogit(lse) takes denominators")
        return block.logs.amax(-1) + lse

    def quantity(self, placing: Placing) -> Quantity | None:
        return "largest_logit" if self.lse is None else None

    def merge(self, state: RowState, other: RowState) -> RowState:
        return state._replace(values=torch.maximum(state.values, other.values))
