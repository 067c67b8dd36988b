"""Inspect calls to torch functions: which tensors are among the arguments, and whether the call writes to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


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


def softmax_dim(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], ndim: int) -> Any:
    """Return the dimension of a call to a softmax function, in a tensor of ``ndim`` dimensions.

    If ``F.softmax`` and ``F.softmin`` get no dimension, torch chooses the first for tensors of 0, 1 and 3 dimensions,
    and otherwise the second.
    """
    if func is F.gumbel_softmax:
        return kwargs.get("dim", args[4] if len(args) > 4 else -1)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return implicit_softmax_dim(ndim) if dim is None else dim


def implicit_softmax_dim(ndim: int) -> int:
    """Return the dimension that torch chooses for ``F.softmax`` without ``dim``."""
    return 0 if ndim in (0, 1, 3) else 1


_EXPOSING = frozenset(
    {"numpy", "__array__", "data_ptr", "storage", "untyped_storage", "_typed_storage", "__dlpack__", "share_memory_"}
)
_IN_PLACE = frozenset({f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow")})
_SETTING = frozenset({f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift")} | {"__setitem__", "__set__"})
