"""Softmax over complete rows of scores, for those who read weights rather than multiply by them."""

from __future__ import annotations

import math

from torch import Tensor

from saccade.kernels.reference import normalised
from saccade.plan import Tile
from saccade.score_matrix import ScoreMatrix
from saccade.sink import log_share

__all__ = ["softmax_rows"]

_NEVER = -1000.0  # exp of it is 0 in every dtype, and 0 times it is 0: unlike -inf, it needs no special case


def softmax_rows(scores: ScoreMatrix, tile: Tile, *, differentiable: bool) -> tuple[Tensor, Tensor | None]:
    """Weights of a tile that holds complete rows, and their logs, ``[batch, heads, rows, columns]``.

    A row that may attend to nothing is 0; a sink takes its share. Logs are at least about -1000, also where the
    weight is 0. With gradients there are none (None), as everything is then computed out of place.
    """
    values = scores.tile(tile)
    if differentiable:
        weights, lse = normalised(values)
        if scores.sink_logit is not None:
            weights = weights * log_share(lse, scores.sink_logit[tile.heads]).exp()[..., None]
        return weights, None
    peak = values.amax(-1, keepdim=True)
    logs = values.sub_(peak.masked_fill_(peak == -math.inf, 0.0)).clamp_min_(_NEVER)
    weights = logs.exp()
    total = weights.sum(-1, keepdim=True)
    log_total = total.masked_fill_(total == 0, 1.0).log()
    if scores.sink_logit is not None:
        log_total -= log_share((log_total + peak)[..., 0], scores.sink_logit[tile.heads])[..., None]
        total = log_total.exp()
    return weights.div_(total), logs.sub_(log_total)
