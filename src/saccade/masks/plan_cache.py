"""Caches of mask plans; the single-row plans that decoding needs have a cache of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from saccade.plan import Plan, make
from saccade.plan.decode_plan import ROWS, RowPlan, RowsAhead

if TYPE_CHECKING:
    from saccade.masks.mask import Mask

_cached_plan = lru_cache(maxsize=256)(make)
_cached_rows = lru_cache(maxsize=16)(RowsAhead)
_cached_row_plan = lru_cache(maxsize=64)(RowPlan)


def plan_of(
    mask: Mask, shape: tuple[int, int, int, int], q_first: int, kv_first: int, whole_rows: bool = False
) -> Plan:
    """Return the plan of a mask, cached if equal masks always allow the same pairs (``is_value``)."""
    if torch.compiler.is_dynamo_compiling():  # run NumPy's index arithmetic instead of tracing it
        outside: Callable[..., Plan] = torch.compiler.disable(_computed_plan)
        return outside(mask, shape, q_first, kv_first, whole_rows)
    batch, heads, q_len, kv_len = shape
    is_last_row = q_len == 1 and kv_len > 1 and q_first == kv_first + kv_len - 1
    if is_last_row and batch and heads and not whole_rows and mask.shape[0] == 1 and mask.is_value:
        rows = _cached_rows(mask, max(kv_first, q_first - q_first % ROWS), kv_first)
        return _cached_row_plan(rows, q_first, shape)
    plan = _cached_plan if mask.is_value else make
    return plan(mask, shape, q_first=q_first, kv_first=kv_first, whole_rows=whole_rows)


def _computed_plan(*args: Any) -> Plan:
    """Return a mask's plan with all of its lazy attributes computed."""
    plan = plan_of(*args)
    plan.is_full, plan.pairs, plan.tiles  # noqa: B018
    return plan
