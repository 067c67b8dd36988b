"""FLOP formulas of the attention operator, for ``torch.utils.flop_counter.FlopCounterMode``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import register_flop_formula

from saccade.engine.custom_op import operator_inputs


def visible_pairs(arguments: tuple[Any, ...]) -> int:
    """Return the number of query-key pairs that the mask of an operator call allows, summed over batch and heads.

    Under ``FakeTensorMode``, the mask's tensors have no values, so every pair counts.
    """
    query, key = arguments[:2]
    batch, heads, q_len, _ = query.shape
    if any(isinstance(x, FakeTensor) or x.is_meta for x in tree_iter(arguments) if isinstance(x, Tensor)):
        return int(batch * heads * q_len * key.shape[2])
    inputs = operator_inputs(arguments).inputs
    total = 0
    for tile in inputs.row_plan.tiles:
        b, h = (torch.arange(part.start, part.stop)[:, None, None] for part in (tile.batch, tile.heads))
        rows = torch.arange(tile.rows.start, tile.rows.stop, tile.rows.step)[:, None] + inputs.origin[0]
        for columns in tile.columns:
            cells = b.numel() * h.numel() * rows.numel() * len(columns.keys)
            if columns.partial is not True:
                keys = torch.arange(columns.keys.start, columns.keys.stop, columns.keys.step) + inputs.origin[1]
                allowed = tile.rule.allows(b[:, None], h[None], rows, keys)
                cells = int(allowed.sum()) * (cells // max(allowed.numel(), 1))
            total += cells
    return total


@register_flop_formula(torch.ops.saccade.product, get_raw=True)
def product_flops(*arguments: Any, out_val: Any = None) -> int:
    """Return the FLOPs of the two matrix products of attention, over the pairs that the mask allows."""
    return 2 * visible_pairs(arguments) * int(arguments[0].shape[3] + arguments[2].shape[3])


@register_flop_formula(torch.ops.saccade.product_backward, get_raw=True)
def product_backward_flops(*arguments: Any, out_val: Any = None) -> int:
    """Return the FLOPs of the gradients, as torch counts them for SDPA: five products, one of which is recomputed."""
    return 2 * visible_pairs(arguments) * int(3 * arguments[0].shape[3] + 2 * arguments[2].shape[3])
