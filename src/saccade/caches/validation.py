"""What caches are told, checked before anything is written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.support.errors import describe, type_error, value_error
from saccade.support.validation import ShapeSpec, check_int, is_integer

__all__ = ["check_call", "check_crop", "check_tensors", "checked_rows"]

_NEW = ShapeSpec(
    "query [batch, heads, q_len, head_dim]",
    "key [batch, kv_heads, q_len, key_dim]",
    "value [batch, kv_heads, q_len, value_dim]",
)


def check_call(mechanism: object, mask: object) -> None:
    """Raise for a mechanism that cannot be called, or a bare tensor as mask: nobody knows which tokens it means."""
    if not callable(mechanism):
        hint = "for instance saccade.mechanisms.Softmax()"
        raise type_error("mechanism", "make matrices", type(mechanism).__name__, hint=hint)
    if isinstance(mask, Tensor):
        hint = "masks.Dense(tensor) reads a tensor at positions; padding goes to positions, as -1"
        raise value_error("mask", "be a rule on positions (not a tensor) with a cache", "a tensor", hint=hint)


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless key and value are ``[batch, kv_heads, q_len, width]`` like the query."""
    hint = "the cache adds the keys of earlier tokens itself; keys of other tokens go to a CrossCache"
    _NEW.check(query, key, value, hint=hint)
    if not query.dtype == key.dtype == value.dtype:
        facts = [describe("query", query), describe("key", key), describe("value", value)]
        got = ", ".join(str(x.dtype).removeprefix("torch.") for x in (query, key, value))
        raise value_error("dtype", "be the same for query, key and value", got, facts=facts)


def checked_rows(rows: Tensor | Sequence[int], batch: int | None) -> Tensor:
    """Batch items as int64 ``[items]``."""
    is_list = isinstance(rows, Sequence) and not isinstance(rows, str) and all(map(is_integer, rows))
    index = torch.tensor(rows, dtype=torch.int64, device="cpu") if is_list else rows
    if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32) or index.dim() != 1:
        got = f"{index.dtype} {list(index.shape)}" if isinstance(index, Tensor) else rows
        raise type_error("rows", "be an int tensor [items], or a list of ints", got)
    if batch is not None and index.numel():
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= batch:
            rule = f"be batch items, from 0 to {batch - 1}"
            raise value_error("rows", rule, low if low < 0 else high)
    return index.to(torch.int64)


def check_crop(length: object, held: int) -> None:
    """Raise unless ``length`` is an int from 0 to what is held."""
    if not 0 <= check_int("length", length, None) <= held:
        raise value_error("length", f"be from 0 to {held}, the columns held", length)
