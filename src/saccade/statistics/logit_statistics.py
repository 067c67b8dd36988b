"""Statistics of the logits (scores) of each row: their variance and their maximum."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from saccade.positions.token_positions import Positions
from saccade.statistics.per_row import PerRow, RowState
from saccade.statistics.row_block import Block, as_slice
from saccade.statistics.statistic import MatrixInfo, MatrixLike, Quantity
from saccade.support.errors import unsupported, value_error
from saccade.support.validation import check_type


@dataclasses.dataclass(frozen=True)
class LogitVariance(PerRow):
    r"""Variance of each query's scores, weighted by its attention, ``[batch, heads, q_len]``, in nats².

    .. math:: \mathrm{Var}_i = \sum_j A_{ij} (\log A_{ij} + H_i)^2 = -\frac{\partial H_i}{\partial \beta}
              \quad \text{at } \beta = 1

    Scores and log weights differ by a constant within a row, so both have this variance. It measures how fast entropy
    falls when all scores are scaled up. It is 0 if all visible keys share the attention evenly, if one key gets all the
    attention, and for a row that attends to nothing.

    Cost: about five operations per weight; O(q_len) memory.

    Raises:
        UnsupportedError: the rows of the matrix are not distributions.
    """

    needs_distributions = True

    def of_rows(self, block: Block, q: Positions, kv: Positions) -> Tensor:
        # Subtract the mean before squaring: logs may be as large as 100, so their squares would cancel in float32.
        centred = (block.logs + block.entropy[..., None]).square_()
        return torch.linalg.vecdot(block.weights, centred)

    def quantity(self, q: Positions, kv: Positions) -> Quantity | None:
        return "variance"


@dataclasses.dataclass(frozen=True, eq=False)
class LargestLogit(PerRow):
    r"""The largest score of each row, after scale, softcap, bias and mask, ``[batch, heads, q_len]``.

    .. math:: \max_j s_{ij} = \max_j \log A_{ij} + L_i

    where L is the log-sum-exp of the scores. Training diverges if these scores grow without bound; QK clipping and
    logit softcaps limit them. The result is -inf for a row that attends to nothing.

    Args:
        lse: log-sum-exp of the scores, ``[batch, heads, q_len]``, for matrices that are not a softmax; when None, the
            log-sum-exp of the matrix itself.

    Raises:
        TypeError: ``lse`` is not a tensor.
        ValueError: the shape of ``lse`` does not fit the matrix.
        UnsupportedError: ``lse`` is None and the matrix is not a softmax of scores.

    Cost: one comparison per weight; O(q_len) memory.

    Example:
        >>> from saccade import AttentionMatrix
        >>> q, k = torch.tensor([2.0, -1.0])[None, None, :, None], torch.tensor([1.0, 3.0])[None, None, :, None]
        >>> A = AttentionMatrix(q, k, scale=1.0)
        >>> A.compute(LargestLogit())[0]
        tensor([[[ 6., -1.]]])
    """

    lse: Tensor | None = None

    def __post_init__(self) -> None:
        check_type("lse", self.lse, (Tensor, type(None)), "be a tensor or None", hint="A.lse is one")

    def of_nothing(self, info: MatrixInfo) -> Tensor:
        if self.lse is not None and self.lse.shape != info.shape[:3]:
            raise value_error("lse", f"be {list(info.shape[:3])}", list(self.lse.shape))
        return super().of_nothing(info).fill_(-math.inf)

    def of_rows(self, block: Block, q: Positions, kv: Positions) -> Tensor:
        lse = block.lse
        if self.lse is not None:
            lse = self.lse.detach()[block.batch, block.heads, as_slice(block.rows)].to(block.weights.dtype)
        if lse is None:
            reason = "its weights are not a softmax of scores, so their denominators are unknown"
            raise unsupported("this matrix", [reason], hint="LargestLogit(lse) takes denominators")
        return block.logs.amax(-1) + lse

    def quantity(self, q: Positions, kv: Positions) -> Quantity | None:
        return "largest_logit" if self.lse is None else None

    def uniform(self, matrix: MatrixLike) -> Tensor:
        reason = "attention is uniform for any scores that are equal, so the largest of them is unknown"
        raise unsupported("a uniform baseline of LargestLogit", [reason])

    def merge(self, state: RowState, other: RowState) -> RowState:
        return state._replace(values=torch.maximum(state.values, other.values))
