"""Taking the rows of a product in another order, where a mask asks for one and it pays."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.ingredients import ScoreMatrix
from saccade.engine.kernels.choice import Kernel
from saccade.masks.grid.squares import in_order, wanted_order

__all__ = ["Reordered", "reordered"]

# A pair in squares costs more, since squares are lower than the tiles of rows in their own order, and their keys are
# gathered; and a tile costs as much as this many pairs.
_PAIR, _TILE = 2.0, 30_000
_FEWEST = 128  # rows below which there is nothing to gain


class Reordered(NamedTuple):
    """A score matrix whose rows stand in another order.

    Attributes:
        scores: the matrix.
        places: where each row went, int64 ``[q_len]``.
    """

    scores: ScoreMatrix
    places: Tensor

    def restored(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Results ``[batch, heads, q_len, ...]`` with their rows back in place."""
        # By way of [batch, len, heads, width], in which heads merge without a copy.
        return out.transpose(1, 2).index_select(1, self.places).transpose(1, 2), lse.index_select(2, self.places)


def reordered(scores: ScoreMatrix, kernel: Kernel, dropout_p: float) -> Reordered | None:
    """The scores in the order that their mask wants, if the kernel then computes them for less; None otherwise.

    Cost: a copy of the queries, and of the bias's rows where it has some; keys and values stay where they are.
    """
    q_len = scores.shape[2]
    order = wanted_order(scores.rule, scores.origin[0], q_len) if q_len >= _FEWEST and 0 not in scores.shape else None
    if order is None:
        return None
    rows, places = (torch.from_numpy(x).to(scores.device) for x in (order.rows, order.places))
    rule = in_order(scores.rule, order)
    made = scores.renumbered(rule)  # whether it pays can be told before anything is copied
    memo = made.plan.memo
    key = ("pays", kernel.name, dropout_p > 0.0)
    if key not in memo:
        price = _PAIR * kernel.pairs(made) + _TILE * len(made.plan)
        memo[key] = price < kernel.pairs(scores) + _TILE * len(scores.plan)
    return Reordered(scores.in_order(rule, rows), places) if memo[key] else None
