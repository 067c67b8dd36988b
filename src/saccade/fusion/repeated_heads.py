"""Detect key and value heads that a model repeats for its query heads, so that the call can read each head once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from saccade.fusion.scores import is_dense, version_of


class Repeated(NamedTuple):
    """An axis along which each entry occurs ``copies`` times consecutively."""

    axis: int
    copies: int


class Repeats:
    """A registry of tensors with repeated entries, such as key heads; tensors that were overwritten are ignored."""

    def __init__(self) -> None:
        self._known: Any = WeakTensorKeyDictionary()

    def record(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record the result of a call if it repeats entries; the function is one of `REPEAT_FUNCTIONS`."""
        if not (args and is_dense(args[0]) and is_dense(out)) or out is args[0]:
            return
        repeated, known = None, self.find(args[0])
        if func in _REPEAT and isinstance(kwargs.get("repeats", args[1] if len(args) > 1 else None), int):
            repeated = _by_repetition(args[0], out)
        elif func in _RESHAPE:
            repeated = _by_expansion(args[0], out)
        elif known is not None:
            repeated = known if func in _KEEPING else _transposed(known, args[0], out)
        if repeated is not None:
            self._known[out] = repeated, version_of(out)

    def find(self, x: Any) -> Repeated | None:
        """Return the repeated axis of a tensor, or None if no repetition is known."""
        if not self._known or not isinstance(x, Tensor) or x not in self._known:
            return None
        repeated, version = self._known[x]
        return repeated if version == version_of(x) else None


def _by_repetition(x: Tensor, out: Tensor) -> Repeated | None:
    """Return the axis along which ``repeat_interleave`` has repeated entries."""
    axes = [axis for axis in range(out.dim()) if x.dim() == out.dim() and x.shape[axis] != out.shape[axis]]
    return Repeated(axes[0], out.shape[axes[0]] // x.shape[axes[0]]) if len(axes) == 1 and x.numel() else None


def _by_expansion(x: Tensor, out: Tensor) -> Repeated | None:
    """Return the axis that a model has repeated by expanding a new axis and merging it into the axis before it."""
    for axis in range(1, x.dim()):
        size = x.shape[axis]
        joined = (*x.shape[: axis - 1], x.shape[axis - 1] * size, *x.shape[axis + 1 :])
        if size > 1 and x.stride(axis) == 0 and tuple(out.shape) == joined:
            return Repeated(axis - 1, size)
    return None


def _transposed(repeated: Repeated, x: Tensor, out: Tensor) -> Repeated | None:
    """Return the repeated axis of a transposed tensor, if its strides show to which position the axis has moved."""
    step, size = x.stride(repeated.axis), x.shape[repeated.axis]
    axes = [axis for axis in range(out.dim()) if (out.stride(axis), out.shape[axis]) == (step, size)]
    return Repeated(axes[0], repeated.copies) if len(axes) == 1 and out.data_ptr() == x.data_ptr() else None


_REPEAT = frozenset({torch.repeat_interleave, Tensor.repeat_interleave})
_RESHAPE = frozenset({torch.reshape, Tensor.reshape, torch.flatten, Tensor.flatten})
_KEEPING = frozenset({Tensor.contiguous, Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.type_as})
_TRANSPOSING = frozenset(
    {torch.transpose, Tensor.transpose, torch.permute, Tensor.permute, Tensor.mT.__get__}  # type: ignore[attr-defined]
)

REPEAT_FUNCTIONS = _REPEAT | _RESHAPE | _KEEPING | _TRANSPOSING
"""Functions that repeat entries, or that preserve the repetitions of their argument."""
