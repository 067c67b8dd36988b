"""Taking the rows of a product in another order, where a mask asks for one and it pays."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Kernel
from saccade.masks.grid.row_order import in_order, wanted_order

__all__ = ["FEWEST", "Reordered", "reordered"]

# A pair in squares costs more, since squares are lower than the tiles of rows in their own order, and their keys are
# gathered; and a tile costs as much as this many pairs.
_PAIR, _TILE = 2.0, 30_000
FEWEST = 128  # rows below which there is nothing to gain


class Reordered(NamedTuple):
    """AttentionInputs whose rows stand in another order.

    Attributes:
        inputs: the ingredients.
        places: where each row went, int64 ``[q_len]``.
    """

    inputs: AttentionInputs
    places: Tensor

    def restored(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Results ``[batch, heads, q_len, ...]`` with their rows back in place."""
        # By way of [batch, len, heads, width], in which heads merge without a copy.
        return out.transpose(1, 2).index_select(1, self.places).transpose(1, 2), lse.index_select(2, self.places)


def reordered(inputs: AttentionInputs, kernel: Kernel, dropout_p: float) -> Reordered | None:
    """The ingredients in the order that their mask wants, if the kernel then runs them for less; None otherwise.

    Cost: a copy of the queries, and of the bias's rows where it has some; keys and values stay where they are.
    """
    order = None if 0 in inputs.shape else wanted_order(inputs.rule, inputs.origin[0], inputs.shape[2])
    if order is None:
        return None
    rule = in_order(inputs.rule, order)
    made = inputs.replaced(rule=rule, origin=(0, inputs.origin[1]))  # whether it pays can be told before a copy is made
    memo = made.plan.memo
    key = ("pays", kernel.name, dropout_p > 0.0)
    if key not in memo:
        price = _PAIR * kernel.pairs(made) + _TILE * len(made.plan)
        memo[key] = price < kernel.pairs(inputs) + _TILE * len(inputs.plan)
    if not memo[key]:
        return None
    rows, places = (torch.from_numpy(x).to(inputs.device) for x in (order.rows, order.places))
    own = made.replaced(
        query=inputs.query.index_select(2, rows),
        row_positions=rows + inputs.origin[0],
        bias=None if inputs.bias is None else inputs.bias.in_order(rows, inputs.shape[3]),
    )
    return Reordered(own, places)
