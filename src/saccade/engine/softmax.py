"""Softmax over complete rows of scores, for those who read weights rather than multiply by them."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from saccade.engine.ingredients import ScoreMatrix
from saccade.engine.kernels.reference import normalised
from saccade.engine.sink import log_share
from saccade.plan import Tile

__all__ = ["SoftmaxRows", "softmax_rows"]

_NEVER = -1000.0  # exp of it is 0 in every dtype, and 0 times it is 0: unlike -inf, it needs no special case


class SoftmaxRows(NamedTuple):
    """Complete rows of a softmax.

    Attributes:
        weights: ``[batch, heads, rows, columns]``; 0 in a row that may attend to nothing.
        logs: of the weights, at least about -1000, also where the weight is 0; None with gradients, where everything
            is computed out of place.
        lse: log of the denominators, ``[batch, heads, rows]``, a sink's share included.
    """

    weights: Tensor
    logs: Tensor | None
    lse: Tensor


def softmax_rows(scores: ScoreMatrix, tile: Tile, *, differentiable: bool) -> SoftmaxRows:
    """Softmax of a tile that holds complete rows."""
    values = scores.tile(tile)
    if differentiable:
        weights, lse = normalised(values)
        if scores.sink_logit is not None:
            share = log_share(lse, scores.sink_logit[tile.heads])
            weights, lse = weights * share.exp()[..., None], lse - share
        return SoftmaxRows(weights, None, lse)
    peak = values.amax(-1, keepdim=True)
    empty = peak == -math.inf
    logs = values.sub_(peak.masked_fill(empty, 0.0)).clamp_min_(_NEVER)
    weights = logs.exp()
    total = weights.sum(-1, keepdim=True).masked_fill_(empty, 1.0)
    log_total = total.log()
    if scores.sink_logit is not None:
        log_total -= log_share((log_total + peak)[..., 0], scores.sink_logit[tile.heads])[..., None]
        total = log_total.exp()
    return SoftmaxRows(weights.div_(total), logs.sub_(log_total), (log_total + peak)[..., 0])
