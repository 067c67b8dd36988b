"""Row permutation: compute the rows of ``A @ value`` in a different order if that is faster for the mask."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Kernel
from saccade.masks.grid.row_order import in_order, wanted_order

# Cost of a pair in square tiles, which have fewer rows and gathered keys, relative to a pair in other tiles;
# cost of a tile, in pairs.
_PAIR, _TILE = 2.0, 30_000
FEWEST = 128  # with fewer rows, a permutation saves nothing


class Reordered(NamedTuple):
    """Checked inputs with permuted rows.

    Attributes:
        inputs: the inputs with permuted rows.
        places: the new index of each row, int64 ``[q_len]``.
    """

    inputs: AttentionInputs
    places: Tensor

    def restored(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and the lse, ``[batch, heads, q_len, ...]``, with rows in the original order."""
        # Via [batch, len, heads, width], because heads merge without a copy in this layout.
        return out.transpose(1, 2).index_select(1, self.places).transpose(1, 2), lse.index_select(2, self.places)


def reordered(inputs: AttentionInputs, kernel: Kernel, dropout_p: float) -> Reordered | None:
    """Return the inputs with rows in the order that suits the mask; None if the kernel would not become faster.

    Cost: a copy of the queries and of the rows of a bias. Keys and values are not copied.
    """
    order = None if 0 in inputs.shape else wanted_order(inputs.rule, inputs.origin[0], inputs.shape[2])
    if order is None:
        return None
    rule = in_order(inputs.rule, order)
    permuted = inputs.replaced(rule=rule, origin=(0, inputs.origin[1]))  # compare costs before copying anything
    memo = permuted.plan.memo
    key = ("pays", kernel.name, dropout_p > 0.0)
    if key not in memo:
        cost = _PAIR * kernel.pairs(permuted) + _TILE * len(permuted.plan)
        memo[key] = cost < kernel.pairs(inputs) + _TILE * len(inputs.plan)
    if not memo[key]:
        return None
    rows, places = (torch.from_numpy(x).to(inputs.device) for x in (order.rows, order.places))
    permuted = permuted.replaced(
        query=inputs.query.index_select(2, rows),
        row_positions=rows + inputs.origin[0],
        bias=None if inputs.bias is None else inputs.bias.permuted(rows, inputs.shape[3]),
    )
    return Reordered(permuted, places)
