"""Checks of calls of a cache, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from saccade.support.errors import describe, type_error, unsupported, value_error
from saccade.support.torch_modes import is_tracing
from saccade.support.validation import ShapeSpec, check_int, is_integer

_NEW = ShapeSpec(
    "query [batch, heads, q_len, head_dim]",
    "key [batch, kv_heads, q_len, key_dim]",
    "value [batch, kv_heads, q_len, value_dim]",
)


def check_call(mechanism: object, mask: object) -> None:
    """Raise for a mechanism that cannot be called, or a tensor as mask, since the tokens of its columns are unknown."""
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
    """Return batch items as int64 ``[items]``."""
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


def check_crop(length: object, stored: int) -> None:
    """Raise unless ``length`` is an int from 0 to the stored length."""
    if not 0 <= check_int("length", length, None) <= stored:
        raise value_error("length", f"be from 0 to {stored}, the columns held", length)


class Region(NamedTuple):
    """The part of a run that gradient checkpointing repeats, as far as it can be recognised.

    A replay runs inside a backward pass, which has a number. In its first run, a region of the non-reentrant
    checkpoint is recognised by torch's hooks for saved tensors; one of the reentrant checkpoint cannot be.

    Args:
        graph_task: number of the backward pass; -1 outside of all.
        hook: id of the checkpoint's hook; 0 outside of all.
    """

    graph_task: int = -1
    hook: int = 0

    @classmethod
    def current(cls) -> Region:
        """Return the innermost region that runs now."""
        if is_tracing():
            return OUTSIDE
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        is_checkpoint = hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
        return cls(torch._C._current_graph_task_id(), id(hooks[0]) if is_checkpoint else 0)

    def repeats(self, made_in: Region) -> bool:
        """Return whether a replay of this region repeats a change of a cache from another region."""
        is_other_pass = self.graph_task not in (-1, made_in.graph_task)
        return is_other_pass or self.hook not in (0, made_in.hook)


OUTSIDE = Region()


def refuse_replay() -> NoReturn:
    """Raise the error of a call that is, or will be, replayed.

    Raises:
        UnsupportedError: always.
    """
    reason = "the backward pass runs this call again, and its tokens would be added to the cache a second time"
    hint = "train without a cache, or make it inside the checkpointed function: layer.new_cache() or cache.fork()"
    raise unsupported("gradient checkpointing", [reason], hint=hint)
