"""Inspect calls to torch functions: which tensors are among the arguments, and whether the call writes to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def map_nested(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to each item in the nested arguments of a torch call; faster than torch's pytree functions."""
    if type(tree) is tuple:
        return tuple([map_nested(function, x) for x in tree])
    if type(tree) is list:
        return [map_nested(function, x) for x in tree]
    if type(tree) is dict:
        return {name: map_nested(function, x) for name, x in tree.items()}
    return function(tree)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in the arguments of a torch call, including those in nested tuples, lists and dicts."""
    for x in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, tuple | list | dict):
            yield from tensors_in(x)


@functools.cache
def writes(func: Callable[..., Any]) -> bool:
    """Return whether a torch function writes to its arguments, or exposes their memory."""
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.is_mutable
    name = str(getattr(func, "__name__", ""))
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name in _IN_PLACE | _SETTING | _EXPOSING or isinstance(func, torch._ops.OpOverloadPacket)


_EXPOSING = frozenset(
    {"numpy", "__array__", "data_ptr", "storage", "untyped_storage", "_typed_storage", "__dlpack__", "share_memory_"}
)
_IN_PLACE = frozenset({f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow")})
_SETTING = frozenset({f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift")} | {"__setitem__", "__set__"})
