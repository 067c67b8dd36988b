"""Plans of masks, kept for the next call: of any size, and of the last rows that decoding asks for one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from saccade import plan
from saccade.plan import Plan
from saccade.plan.last_row import RowsAhead

if TYPE_CHECKING:
    from saccade.masks.mask import Mask

__all__ = ["plan_of"]


def plan_of(
    mask: Mask, shape: tuple[int, int, int, int], q_first: int, kv_first: int, whole_rows: bool = False
) -> Plan:
    """The plan of a mask, kept for the next call if the mask is a value."""
    make: Callable[..., Plan] = _kept_plan if mask.is_value else _new_plan
    if torch.compiler.is_compiling():  # index arithmetic in NumPy is run, not traced
        make = torch.compiler.disable(make)
    return make(mask, shape, q_first, kv_first, whole_rows)


@lru_cache(maxsize=16)
def _kept_rows(mask: Mask, first: int, kv_first: int) -> RowsAhead:
    return RowsAhead(mask, first, kv_first)


def _new_plan(mask: Mask, shape: tuple[int, int, int, int], q_first: int, kv_first: int, whole_rows: bool) -> Plan:
    return plan.make(mask, shape, q_first=q_first, kv_first=kv_first, whole_rows=whole_rows)


@lru_cache(maxsize=256)
def _kept_plan(mask: Mask, shape: tuple[int, int, int, int], q_first: int, kv_first: int, whole_rows: bool) -> Plan:
    batch, heads, q_len, kv_len = shape
    is_last_row = q_len == 1 and kv_len > 1 and q_first == kv_first + kv_len - 1
    if is_last_row and batch and heads and mask.shape[0] == 1 and not whole_rows:
        rows = _kept_rows(mask, max(kv_first, RowsAhead.start_of(q_first)), kv_first)
        return rows.plan(q_first, shape)
    return _new_plan(mask, shape, q_first, kv_first, whole_rows)
