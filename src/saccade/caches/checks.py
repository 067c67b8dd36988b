"""What caches are told, checked before anything is written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from saccade.errors import describe, type_error, value_error

__all__ = [
    "check_count",
    "check_crop",
    "check_dense_mask",
    "check_mechanism",
    "check_new",
    "checked_path",
    "checked_rows",
]


def check_count(where: str, name: str, count: object, least: int = 1) -> None:
    """Raise unless ``count`` is an int of at least ``least``."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise type_error(where, name, f"be an int of at least {least}", repr(count))
    if count < least:
        raise value_error(where, name, f"be an int of at least {least}", count)


def check_new(where: str, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless key and value are ``[batch, kv_heads, q_len, width]`` for the batch and length of the query."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise type_error(where, name, "be a tensor", type(x).__name__)
        if x.dim() != 4:
            raise value_error(where, name, "have four dimensions, [batch, heads, len, head_dim]", list(x.shape))
    (batch, _, q_len, _), own = query.shape, key.shape
    fits = own[0] == batch and own[2] == q_len and own[:3] == value.shape[:3]
    if not (fits and query.dtype == key.dtype == value.dtype):
        raise _misfit(where, query, key, value)


def _misfit(where: str, query: Tensor, key: Tensor, value: Tensor) -> Exception:
    """Why they do not fit: found out, and put in words, only once it is known that they do not."""
    facts = [describe("query", query), describe("key", key), describe("value", value)]
    if key.shape[0] != query.shape[0] or key.shape[2] != query.shape[2]:
        hint = "the cache adds the keys of earlier tokens itself; keys of other tokens go to a CrossCache"
        rule = "hold the keys of the query's own tokens"
        return value_error(where, "key", rule, list(key.shape), facts=facts, hint=hint)
    if value.shape[:3] != key.shape[:3]:
        expected = f"[{', '.join(map(str, key.shape[:3]))}, value_dim]"
        return value_error(where, "value", f"have shape {expected}", list(value.shape), facts=facts)
    got = ", ".join(str(x.dtype).removeprefix("torch.") for x in (query, key, value))
    return value_error(where, "dtype", "be the same for query, key and value", got, facts=facts)


def check_mechanism(where: str, mechanism: object) -> None:
    """Raise unless the mechanism is what it takes to be called; what it makes is looked at when it is made."""
    if not callable(mechanism):
        hint = "for instance saccade.mechanisms.Softmax()"
        raise type_error(where, "mechanism", "make matrices", type(mechanism).__name__, hint=hint)


def checked_path(where: str, name: str, path: object) -> Path:
    """A place in the file system; raises unless it was given as a string or a path."""
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if not isinstance(path, str):
        raise type_error(where, name, "be a string or a path", type(path).__name__)
    return Path(path)


def check_dense_mask(where: str, mask: object) -> None:
    """Raise if the mask is a bare tensor: with a cache nobody could say which tokens its columns mean."""
    if isinstance(mask, Tensor):
        hint = "masks.Dense(tensor) reads a tensor at positions; padding goes to positions, as -1"
        raise value_error(where, "mask", "be a rule on positions (not a tensor) with a cache", "a tensor", hint=hint)


def checked_rows(where: str, rows: Tensor | Sequence[int], batch: int | None) -> Tensor:
    """Batch items as int64 ``[items]``."""
    if isinstance(rows, Tensor):
        if rows.dtype not in (torch.int64, torch.int32) or rows.dim() != 1:
            got = f"{str(rows.dtype).removeprefix('torch.')} {list(rows.shape)}"
            raise type_error(where, "rows", "be an int tensor [items], or a list of ints", got)
        index = rows.to(torch.int64)
    else:
        if isinstance(rows, str) or not isinstance(rows, Sequence):
            raise type_error(where, "rows", "be an int tensor [items], or a list of ints", type(rows).__name__)
        if not all(isinstance(row, int) and not isinstance(row, bool) for row in rows):
            raise type_error(where, "rows", "be an int tensor [items], or a list of ints", list(rows))
        index = torch.tensor(list(rows), dtype=torch.int64)
    if batch is not None and index.numel():
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= batch:
            rule = f"be batch items, from 0 to {batch - 1}"
            raise value_error(where, "rows", rule, low if low < 0 else high)
    return index


def check_crop(where: str, length: object, held: int) -> None:
    """Raise unless ``length`` is an int from 0 to what is held."""
    if isinstance(length, bool) or not isinstance(length, int):
        raise type_error(where, "length", "be an int", repr(length))
    if not 0 <= length <= held:
        raise value_error(where, "length", f"be from 0 to {held}, the columns held", length)
