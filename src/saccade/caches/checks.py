"""What caches are told, checked before anything is written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.arguments import Shapes, integer, is_integer
from saccade.errors import describe, type_error, value_error

__all__ = ["check_call", "check_crop", "check_tensors", "checked_rows"]

_NEW = Shapes(
    "query [batch, heads, q_len, head_dim]",
    "key [batch, kv_heads, q_len, key_dim]",
    "value [batch, kv_heads, q_len, value_dim]",
)


def check_call(where: str, mechanism: object, mask: object) -> None:
    """Raise for a mechanism that cannot be called, or a bare tensor as mask: nobody knows which tokens it means."""
    if not callable(mechanism):
        hint = "for instance saccade.mechanisms.Softmax()"
        raise type_error(where, "mechanism", "make matrices", type(mechanism).__name__, hint=hint)
    if isinstance(mask, Tensor):
        hint = "masks.Dense(tensor) reads a tensor at positions; padding goes to positions, as -1"
        raise value_error(where, "mask", "be a rule on positions (not a tensor) with a cache", "a tensor", hint=hint)


def check_tensors(where: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless key and value are ``[batch, kv_heads, q_len, width]`` like the query."""
    hint = "the cache adds the keys of earlier tokens itself; keys of other tokens go to a CrossCache"
    _NEW.check(where, query, key, value, hint=hint)
    if not query.dtype == key.dtype == value.dtype:
        facts = [describe("query", query), describe("key", key), describe("value", value)]
        got = ", ".join(str(x.dtype).removeprefix("torch.") for x in (query, key, value))
        raise value_error(where, "dtype", "be the same for query, key and value", got, facts=facts)


def checked_rows(where: str, rows: Tensor | Sequence[int], batch: int | None) -> Tensor:
    """Batch items as int64 ``[items]``."""
    rule = "be an int tensor [items], or a list of ints"
    if isinstance(rows, Tensor):
        if rows.dtype not in (torch.int64, torch.int32) or rows.dim() != 1:
            got = f"{str(rows.dtype).removeprefix('torch.')} {list(rows.shape)}"
            raise type_error(where, "rows", rule, got)
        index = rows.to(torch.int64)
    else:
        if isinstance(rows, str) or not isinstance(rows, Sequence):
            raise type_error(where, "rows", rule, type(rows).__name__)
        if not all(map(is_integer, rows)):
            raise type_error(where, "rows", rule, list(rows))
        index = torch.tensor(list(rows), dtype=torch.int64)
    if batch is not None and index.numel():
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= batch:
            rule = f"be batch items, from 0 to {batch - 1}"
            raise value_error(where, "rows", rule, low if low < 0 else high)
    return index


def check_crop(where: str, length: object, held: int) -> None:
    """Raise unless ``length`` is an int from 0 to what is held."""
    if not 0 <= integer(where, "length", length, None) <= held:
        raise value_error(where, "length", f"be from 0 to {held}, the columns held", length)
