"""Apply torch functions to lazy attention scores: arithmetic, masking, casts, views, softmax and dropout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.fusion.arguments import implicit_softmax_dim, writes
from saccade.fusion.axes import Axis
from saccade.fusion.row_maximum import RowMaximum
from saccade.fusion.scores import Scores, is_dense
from saccade.fusion.written_softmax import OfScores, softmax_after

ScoresFunction = Callable[..., Scores | RowMaximum | None]
"""A torch function's counterpart for `Scores` in place of lazy tensors. It returns None if a call is unsupported."""


def functions(*names: str) -> tuple[Callable[..., Any], ...]:
    """Return torch's functions and tensor methods with the given names."""
    functions = [getattr(owner, name, None) for name in names for owner in (torch, Tensor)]
    return tuple(x for x in functions if x is not None)


def _multiply(a: Any, b: Any) -> Scores | None:
    scores, other = (a, b) if isinstance(a, Scores) else (b, a)
    number = _as_float(other)
    if number is not None:
        return scores.times_number(number)
    return scores.times(other) if is_dense(other) else None


def _divide(scores: Scores, other: Any) -> Scores | None:
    number = _as_float(other)
    if number == 0:
        return None
    if number is not None:
        return scores.times_number(1.0 / number)
    if not is_dense(other) or not other.is_floating_point():
        return None
    return scores.times(other.reciprocal())


def _add(a: Any, b: Any, *, alpha: float = 1) -> Scores | None:
    scores, other, scale = (a, b, float(alpha)) if isinstance(a, Scores) else (b, a, 1.0)
    if scores is b and alpha != 1:
        return None
    return _plus(scores, other, scale)


def _subtract(a: Any, b: Any, *, alpha: float = 1) -> Scores | None:
    if isinstance(b, RowMaximum):
        return a.minus_maximum(b.axis) if a is b.of and alpha == 1 else None
    return _plus(a, b, -float(alpha)) if isinstance(a, Scores) else None


def _plus(scores: Scores, other: Any, scale: float) -> Scores | None:
    if isinstance(other, int | float) and not isinstance(other, bool):
        return scores.plus_number(float(other) * scale)
    return scores.plus(other, scale) if is_dense(other) else None


def _masked_fill(scores: Scores, mask: Any, value: Any) -> Scores | None:
    if not is_dense(mask):
        return None
    number = _as_float(value)
    return None if number is None else scores.filled(mask, number)


def _maximum(scores: Scores, other: Any) -> Scores | None:
    number = _as_float(other)
    return None if number is None else scores.floored(number)


def _clamp(scores: Scores, min: Any = None, max: Any = None) -> Scores | None:  # noqa: A002  torch's names
    return _maximum(scores, min) if max is None else None


def _where(condition: Any, a: Any, b: Any) -> Scores | None:
    scores, value = (a, b) if isinstance(a, Scores) else (b, a)
    if not is_dense(condition) or condition.dtype != torch.bool:
        return None
    number, others = _as_float(value), None
    if number is None and is_dense(value) and value.is_floating_point() and not value.requires_grad and value.numel():
        number, others = float(value.amax()), value
    return None if number is None else scores.filled(~condition if scores is a else condition, number, others)


def _where_method(a: Any, condition: Any, b: Any) -> Scores | None:
    return _where(condition, a, b)


def _set_item(scores: Scores, index: Any, value: Any) -> Scores | None:
    is_mask = is_dense(index) and index.dtype == torch.bool
    return _masked_fill(scores, index, value) if is_mask and index.shape == scores.axes.shape else None


def _amax(scores: Scores, dim: Any = (), keepdim: bool = False) -> RowMaximum | None:
    axis = _axis(scores, dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim)
    is_keys = axis is not None and scores.is_keys(axis)
    return RowMaximum(scores, axis, scores.operands) if keepdim and is_keys else None  # type: ignore[arg-type]


def _negative(scores: Scores) -> Scores | None:
    return scores.times_number(-1.0)


def _max(scores: Scores, *args: Any, **kwargs: Any) -> Scores | RowMaximum | None:
    is_reduction = "dim" in kwargs or (bool(args) and isinstance(args[0], int))
    return _amax(scores, *args, **kwargs) if is_reduction else _maximum(scores, *args, **kwargs)


def _tanh(scores: Scores) -> Scores | None:
    return scores.tanh()


def _to(scores: Scores, *args: Any, dtype: Any = None, copy: bool = False, **options: Any) -> Scores | None:
    """Apply ``to``, ``type`` or ``type_as`` to lazy scores."""
    for x in args:
        if isinstance(x, torch.dtype):
            dtype = x
        elif (isinstance(x, Tensor) and x.device == scores.left.device) or isinstance(x, Scores):
            dtype = x.dtype
        elif isinstance(x, str) and x.startswith("torch."):  # the name of a tensor type
            like = scores.left.new_empty(0).type(x)
            if like.device != scores.left.device:
                return None
            dtype = like.dtype
        elif not isinstance(x, bool) and x != scores.left.device:
            return None
    if (
        not set(options) <= {"non_blocking", "device"}
        or options.get("device", scores.left.device) != scores.left.device
    ):
        return None
    is_same = dtype in (None, scores.dtype) and not copy and not any(x is True for x in args)
    return scores if is_same else scores.cast(scores.dtype if dtype is None else dtype)


def _cast_to(dtype: torch.dtype) -> ScoresFunction:
    return lambda scores: scores if scores.dtype == dtype else scores.cast(dtype)


def _contiguous(scores: Scores) -> Scores:
    return replace(scores)  # an einsum's result may not be contiguous even if its axes are in order


def _clone(scores: Scores, **_: Any) -> Scores:
    return replace(scores)


def _softmax(scores: Scores, dim: Any = None, dtype: Any = None) -> Scores | None:
    axis = _axis(scores, dim)
    return None if axis is None else scores.softmaxed(axis, dtype)


def _softmax_function(scores: Scores, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Scores | None:
    return _softmax(scores, implicit_softmax_dim(len(scores.axes.axes)) if dim is None else dim, dtype)


def _softmin(scores: Scores, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Scores | None:
    negative = _negative(scores)
    return None if negative is None else _softmax_function(negative, dim, dtype=dtype)


def _nan_to_num(scores: Scores, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Scores | None:
    return scores.finite(neginf) if scores.softmax is None or nan in (None, 0.0) else None


def _dropout(scores: Scores, p: float = 0.5, training: bool = True, inplace: bool = False) -> Scores | None:
    return scores.dropped(p) if training and p > 0 else scores


def _torch_dropout(input: Scores, p: float, train: bool) -> Scores | None:  # noqa: A002  torch's name
    return _dropout(input, p, train)


# ---- views -----------------------------------------------------------------------------------------------------


def _view(scores: Scores, *sizes: Any, **kwargs: Any) -> Scores | None:
    shape = _int_arguments(sizes) if not kwargs else _int_arguments((kwargs.get("shape", kwargs.get("size")),))
    if shape is None:
        return None
    if -1 in shape:
        rest = -math.prod(shape)
        if rest <= 0 or math.prod(scores.axes.shape) % rest:
            return None
        shape = [math.prod(scores.axes.shape) // rest if size == -1 else size for size in shape]
    return scores.view(shape)


def _view_as(scores: Scores, other: Any) -> Scores | None:
    return scores.view(tuple(other.axes.shape if isinstance(other, Scores) else other.shape))


def _flatten(scores: Scores, start_dim: int = 0, end_dim: int = -1) -> Scores | None:
    first, last = _axis(scores, start_dim), _axis(scores, end_dim)
    shape = scores.axes.shape
    if first is None or last is None or first > last:
        return None
    return scores.view((*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]))


def _unflatten(scores: Scores, dim: int, sizes: Any) -> Scores | None:
    axis, shape = _axis(scores, dim), list(scores.axes.shape)
    parts = _int_arguments((sizes,))
    if axis is None or parts is None:
        return None
    return _view(scores, *shape[:axis], *parts, *shape[axis + 1 :]) if -1 not in parts else None


def _expand(scores: Scores, *sizes: Any) -> Scores | None:
    shape = _int_arguments(sizes)
    current = scores.axes.shape
    is_same = (
        shape is not None
        and len(shape) == len(current)
        and all(x in (-1, y) for x, y in zip(shape, current, strict=True))
    )
    return replace(scores) if is_same else None


def _unsqueeze(scores: Scores, dim: int) -> Scores | None:
    axes = list(scores.axes.axes)
    if not -len(axes) - 1 <= dim <= len(axes):
        return None
    axes.insert(dim + len(axes) + 1 if dim < 0 else dim, ())
    return scores.regrouped(tuple(axes))


def _squeeze(scores: Scores, dim: int | None = None) -> Scores | None:
    axis = None if dim is None else _axis(scores, dim)
    if dim is not None and axis is None:
        return None
    axes = zip(scores.axes.axes, scores.axes.shape, strict=True)
    kept = (factors for i, (factors, size) in enumerate(axes) if size > 1 or (dim is not None and i != axis))
    return scores.regrouped(tuple(kept))


def _transpose(scores: Scores, dim0: int, dim1: int) -> Scores | None:
    first, second = _axis(scores, dim0), _axis(scores, dim1)
    if first is None or second is None:
        return None
    order = list(range(len(scores.axes.axes)))
    order[first], order[second] = second, first
    return scores.permuted(order)


def _permute(scores: Scores, *dims: Any) -> Scores | None:
    order = _int_arguments(dims)
    axes = None if order is None else [_axis(scores, x) for x in order]
    if axes is None or None in axes or sorted(axes) != list(range(len(scores.axes.axes))):  # type: ignore[type-var]
        return None
    return scores.permuted(axes)  # type: ignore[arg-type]


def _matrix_transpose(scores: Scores, *_: Any) -> Scores | None:
    return _transpose(scores, -2, -1) if len(scores.axes.axes) > 1 else None


def _get_item(scores: Scores, index: Any) -> Scores | None:
    """Index lazy scores with an index that only adds axes, such as ``scores[:, None]``."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(x is None or x is ... or (isinstance(x, slice) and x == slice(None)) for x in parts):
        return None
    axes = list(scores.axes.axes)
    named = sum(x is not None and x is not ... for x in parts)
    if parts.count(...) > 1 or named > len(axes):
        return None
    rest = len(axes) - named
    parts = parts if ... in parts else (*parts, ...)
    regrouped: list[Axis] = []
    for part in parts:
        count = 0 if part is None else rest if part is ... else 1
        regrouped += [()] if part is None else axes[:count]
        axes = axes[count:]
    return scores.regrouped(tuple(regrouped))


def _as_float(x: Any) -> float | None:
    """Convert a number or a zero-dimensional CPU tensor to a float; return None for any other argument."""
    if isinstance(x, int | float) and not isinstance(x, bool):
        return float(x)
    if is_dense(x) and x.dim() == 0 and x.is_cpu and not x.requires_grad and not x.is_complex():
        return float(x)
    return None


def _axis(scores: Scores, dim: Any) -> int | None:
    """Convert a dimension of lazy scores to a non-negative index; return None if it does not exist."""
    count = len(scores.axes.axes)
    return dim % count if isinstance(dim, int) and not isinstance(dim, bool) and -count <= dim < count else None


def _int_arguments(sizes: Sequence[Any]) -> list[int] | None:
    """Return the sizes or dimensions passed to a view, separately or as one sequence; None if any is not an int."""
    if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
        sizes = sizes[0]
    return [int(x) for x in sizes] if all(type(x) is int for x in sizes) else None


OPERATIONS: dict[Callable[..., Any], ScoresFunction] = {
    **dict.fromkeys(functions("mul", "multiply", "mul_", "multiply_", "__mul__", "__rmul__", "__imul__"), _multiply),
    **dict.fromkeys(functions("div", "divide", "true_divide"), _divide),
    **dict.fromkeys(functions("div_", "divide_", "true_divide_", "__truediv__", "__itruediv__", "__div__"), _divide),
    **dict.fromkeys(functions("neg", "neg_", "negative", "negative_", "__neg__"), _negative),
    **dict.fromkeys(functions("add", "add_", "__add__", "__radd__", "__iadd__"), _add),
    **dict.fromkeys(functions("sub", "subtract", "sub_", "subtract_", "__sub__", "__isub__"), _subtract),
    **dict.fromkeys(functions("masked_fill", "masked_fill_"), _masked_fill),
    torch.where: _where,
    Tensor.where: _where_method,
    Tensor.__setitem__: _set_item,
    **dict.fromkeys(functions("max"), _max),
    **dict.fromkeys(functions("maximum"), _maximum),
    **dict.fromkeys(functions("clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_min_"), _clamp),
    **dict.fromkeys(functions("amax"), _amax),
    **dict.fromkeys(functions("tanh", "tanh_"), _tanh),
    **dict.fromkeys(functions("to", "type", "type_as"), _to),
    Tensor.float: _cast_to(torch.float32),
    Tensor.half: _cast_to(torch.float16),
    Tensor.bfloat16: _cast_to(torch.bfloat16),
    Tensor.double: _cast_to(torch.float64),
    Tensor.contiguous: _contiguous,
    **dict.fromkeys(functions("clone"), _clone),
    **dict.fromkeys((*functions("softmax"), torch.special.softmax), _softmax),
    F.softmax: _softmax_function,
    F.softmin: _softmin,
    **dict.fromkeys(functions("nan_to_num", "nan_to_num_"), _nan_to_num),
    F.dropout: _dropout,
    torch.dropout: _torch_dropout,
    **dict.fromkeys(functions("view", "reshape"), _view),
    **dict.fromkeys(functions("view_as", "reshape_as"), _view_as),
    **dict.fromkeys(functions("flatten"), _flatten),
    **dict.fromkeys(functions("unflatten"), _unflatten),
    **dict.fromkeys(functions("expand"), _expand),
    **dict.fromkeys(functions("unsqueeze"), _unsqueeze),
    **dict.fromkeys(functions("squeeze"), _squeeze),
    **dict.fromkeys(functions("transpose", "swapaxes", "swapdims"), _transpose),
    **dict.fromkeys(functions("permute"), _permute),
    Tensor.mT.__get__: _matrix_transpose,  # type: ignore[attr-defined]
    Tensor.__getitem__: _get_item,
}
"""The function that applies each torch function to `Scores`; any other torch function needs computed values."""

_ANYWHERE = frozenset({_multiply, _add, _where, _where_method})  # the scores need not be the first argument


_DETACH = frozenset(functions("detach"))


def scores_after(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Scores | RowMaximum | OfScores | None:
    """Return the lazy scores after a call to a torch function, or None if `Scores` cannot express the result.

    If the torch function returns its argument, the same `Scores` object is returned.
    """
    if func in _DETACH and args and isinstance(args[0], RowMaximum):
        return args[0].detached()
    written = softmax_after(func, args, kwargs)
    if written is not None:
        return written
    apply = OPERATIONS.get(func)
    positions = [position for position, x in enumerate(args) if isinstance(x, Scores)]
    if apply is None or not positions or (positions[0] and (apply not in _ANYWHERE or writes(func))):
        return None
    try:
        return apply(*args, **kwargs)
    except TypeError:  # unknown arguments: torch accepts or refuses them
        return None
