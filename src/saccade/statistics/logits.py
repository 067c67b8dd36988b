"""What rows say of the scores they were made of."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.errors import type_error, value_error
from saccade.plan import Strip, Triangle
from saccade.score_matrix import ScoreMatrix
from saccade.statistics.block import Block, as_slice
from saccade.statistics.fold import Outline
from saccade.statistics.per_row import PerRow, Placing, RowState

__all__ = ["KnownKeys", "LargestLogit", "LogitVariance", "SpanOfLogs", "known_keys", "largest_logit"]

_CLAMPED = -900.0  # logs below it may have been cut off at -1000


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

    @property
    def needs_distributions(self) -> bool:
        return True

    def of_rows(self, block: Block, placing: Placing) -> Tensor:
        # Centred first: of squares of logs, which may be 100, little would be left in float32.
        centred = (block.logs + block.entropy[..., None]).square_()
        return torch.linalg.vecdot(block.weights, centred)


@dataclasses.dataclass(frozen=True, eq=False)
class LargestLogit(PerRow):
    r"""The largest score of each row, after scale, softcap, bias and mask, ``[batch, heads, q_len]``.

    .. math:: \max_j s_{ij} = \max_j \log A_{ij} + L_i

    with L the log-sum-exp of the scores. Training diverges where these grow without bound; they are what QK clipping
    and logit softcaps limit. A row that attends to nothing has -inf.

    Args:
        lse: ``[batch, heads, q_len]``, as `saccade.AttentionMatrix.lse` gives it. It is kept once a product has run.

    Raises:
        TypeError: ``lse`` is no tensor.
        ValueError: it does not fit the matrix.

    Cost: one comparison per weight, and `lse`: one product if none has run; O(q_len) memory.

    Example:
        >>> from saccade import AttentionMatrix
        >>> q, k = torch.tensor([2.0, -1.0])[None, None, :, None], torch.tensor([1.0, 3.0])[None, None, :, None]
        >>> A = AttentionMatrix(q, k, scale=1.0)
        >>> A.ask(LargestLogit(A.lse))[0]
        tensor([[[ 6., -1.]]])
    """

    lse: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.lse, Tensor):
            raise type_error("LargestLogit", "lse", "be a tensor", type(self.lse).__name__, hint="A.lse is one")

    def start(self, outline: Outline) -> RowState:
        if self.lse.shape != outline.shape[:3]:
            raise value_error("LargestLogit", "lse", f"be {list(outline.shape[:3])}", list(self.lse.shape))
        return super().start(outline)

    def of_rows(self, block: Block, placing: Placing) -> Tensor:
        return block.logs.amax(-1)

    def finish(self, state: RowState) -> Tensor:
        # The state has 0 for rows in no block; their lse is -inf, and so is the sum.
        return state.values + self.lse.detach().to(state.values.dtype)


class KnownKeys(NamedTuple):
    """A key that each query sees, and the score of the two.

    Attributes:
        keys: indices, int64 ``[q_len]``.
        scores: ``[batch, heads, q_len]``.
    """

    keys: Tensor
    scores: Tensor


def known_keys(scores: ScoreMatrix) -> KnownKeys | None:
    """A key that each query sees, if the plan names one for all of them.

    Cost: O(q_len · head_dim): one score a query.
    """
    batch, heads, q_len, _ = scores.shape
    keys = torch.zeros(q_len, dtype=torch.int64, device=scores.device)
    known = torch.zeros(batch, heads, q_len, dtype=scores.compute_dtype, device=scores.device)
    for tile in scores.row_plan.tiles:
        for strip in tile.columns:
            residual = strip.residual
            if residual is True or (isinstance(residual, Triangle) and residual.offset >= 0):
                break
        else:
            return None
        key = strip.keys[0]
        column = tile._replace(columns=(Strip(range(key, key + 1), True),))
        keys[as_slice(tile.rows)] = key
        known[tile.batch, tile.heads, as_slice(tile.rows)] = scores.tile(column)[..., 0]
    return KnownKeys(keys, known)


@dataclasses.dataclass(frozen=True, eq=False)
class SpanOfLogs(PerRow):
    """How far the largest log weight of each row is above that of a chosen key; NaN where logs were cut off."""

    keys: Tensor

    def of_rows(self, block: Block, placing: Placing) -> Tensor:
        chosen = self.keys[as_slice(block.rows)][:, None]
        logs = block._replace(weights=block.logs).at_keys(chosen)[..., 0]
        return block.logs.amax(-1) - logs.masked_fill(logs < _CLAMPED, torch.nan)


def largest_logit(known: KnownKeys, span: Tensor) -> Tensor | None:
    """What `LargestLogit` answers, from one score of each row; None where that says too little."""
    return None if bool(span.isnan().any()) else known.scores + span
