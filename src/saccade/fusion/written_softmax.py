"""A softmax that a model writes with exponentials: divided by their sum over the keys, they are attention weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.fusion.axes import Axes
from saccade.fusion.scores import Fill, Scores, is_dense, version_of


@dataclass(frozen=True)
class OfScores:
    """A tensor that a model computes from lazy scores on the way to their softmax.

    Args:
        of: the scores.
        axis: the key axis; -1 if it is unknown.
        dtype: the dtype that the model sees.
        operands: each tensor that was read, with its version counter at that time.
    """

    of: Scores
    axis: int
    dtype: torch.dtype
    operands: tuple[tuple[Tensor, int], ...] = field(default=(), repr=False)
    softmax: ClassVar[None] = None
    dropout_p: ClassVar[float] = 0.0
    is_detached: ClassVar[bool] = False

    @property
    def axes(self) -> Axes:
        """The axes of the tensor, as the model sees them."""
        return self.of.axes

    @property
    def left(self) -> Tensor:
        """The left operand of the scores; it is on the same device as the scores."""
        return self.of.left

    @property
    def is_current(self) -> bool:
        """Whether all operands are unchanged since they were read."""
        return self.of.is_current and all(version_of(x) == version for x, version in self.operands)

    def check_current(self) -> None:
        """Raise an error if code that calls no torch function has overwritten an operand."""
        replace(self.of, operands=(*self.of.operands, *self.operands)).check_current()

    def with_operands(self, tensors: Iterable[Tensor]) -> Any:
        """Return a copy with additional operands."""
        return replace(self, operands=(*self.operands, *((x, version_of(x)) for x in tensors)))


class Exponentials(OfScores):
    """The exponentials of scores."""


class LogWeights(OfScores):
    """The logarithms of attention weights: scores minus the logarithm of the sum of their exponentials."""


class _Reduced(OfScores):
    @property
    def axes(self) -> Axes:
        axes = self.of.axes.axes
        return Axes(self.of.axes.sizes, (*axes[: self.axis], (), *axes[self.axis + 1 :]))


class RowSum(_Reduced):
    """The sum of the exponentials of each row, with the key axis kept."""


class RowLogSumExp(_Reduced):
    """The logarithm of the sum of the exponentials of each row, with the key axis kept."""


class RowArgmax(_Reduced):
    """The position of the maximum of each row, with the key axis kept."""

    is_detached: ClassVar[bool] = True


def _functions(*names: str) -> frozenset[Callable[..., Any]]:
    found = (getattr(owner, name, None) for name in names for owner in (torch, Tensor, torch.special))
    return frozenset(x for x in found if x is not None)


EXP = _functions("exp")
LOG_SOFTMAX = _functions("log_softmax") | {F.log_softmax}
SUM = _functions("sum")
_LOGSUMEXP = _functions("logsumexp")
DIVIDE = _functions("div", "divide", "true_divide", "__truediv__")
_SUBTRACT = _functions("sub", "subtract", "__sub__")
_MULTIPLY = _functions("mul", "multiply", "__mul__")
_FILL = _functions("masked_fill")


def softmax_after(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Scores | OfScores | None:
    """Return the state after a call that writes a part of a softmax; None for other calls."""
    first = args[0] if args else None
    if not isinstance(first, Scores | Exponentials | LogWeights):
        return None
    other = args[1] if len(args) == 2 and not kwargs else None
    if isinstance(first, Scores):
        return _of_scores(func, first, args, kwargs, other)
    if isinstance(first, LogWeights):
        return _divided(first, first.axis) if func in EXP and len(args) == 1 and not kwargs else None
    return _of_exponentials(func, first, args, kwargs, other)


def _of_exponentials(
    func: Callable[..., Any], first: Exponentials, args: Sequence[Any], kwargs: dict[str, Any], other: Any
) -> Scores | OfScores | None:
    if func in SUM:
        axis = _reduced_axis(first.of, args[1:], kwargs)
        return None if axis is None else RowSum(first.of, axis, _dtype_after(torch.sum, first.dtype, first.left.device))
    if func in DIVIDE and isinstance(other, RowSum):
        return _divided(first, other.axis) if other.of is first.of else None
    if func in _MULTIPLY and is_dense(other) and not other.requires_grad:
        return _cleared(first, other == 0) if bool(((other == 0) | (other == 1)).all()) else None
    is_filled = func in _FILL and len(args) == 3 and args[2] == 0 and is_dense(args[1])
    return _cleared(first, args[1]) if is_filled else None


def _of_scores(
    func: Callable[..., Any], scores: Scores, args: Sequence[Any], kwargs: dict[str, Any], other: Any
) -> OfScores | None:
    device = scores.left.device
    if scores.softmax is not None:
        return None
    if func in EXP and len(args) == 1 and not kwargs:
        return Exponentials(scores, -1, _dtype_after(torch.exp, scores.dtype, device))
    if func in _LOGSUMEXP:
        axis = _reduced_axis(scores, args[1:], kwargs)
        return None if axis is None else RowLogSumExp(scores, axis, scores.dtype)
    if func in _SUBTRACT and isinstance(other, RowLogSumExp) and other.of is scores:
        return LogWeights(scores, other.axis, scores.dtype)
    if func in LOG_SOFTMAX and kwargs.get("dtype") is None and len(args) < 3:
        axis = _axis(scores, kwargs.get("dim", args[1] if len(args) > 1 else None))
        dtype = _dtype_after(functools.partial(torch.log_softmax, dim=0), scores.dtype, device)
        return None if axis is None or not scores.is_keys(axis) else LogWeights(scores, axis, dtype)
    return None


def _cleared(exponentials: Exponentials, pairs: Tensor) -> Exponentials | None:
    """Return exponentials of which some were set to 0: those of scores of -inf."""
    scores = exponentials.of
    filled = scores.filled(pairs, -torch.inf) if scores.maximum_of is None else None
    return None if filled is None else replace(exponentials, of=filled)


def _divided(x: Exponentials | LogWeights, axis: int) -> Scores | None:
    scores = x.of
    if isinstance(x, Exponentials) and scores.fills and scores.maximum_of is None:
        # Unlike a softmax, exponentials give NaN in a row in which one number masks all pairs. `attention_call` refuses
        # such rows if there are fills with two numbers.
        nothing = torch.zeros((1,) * len(scores.all_factors), dtype=torch.bool, device=scores.left.device)
        scores = replace(scores, fills=(*scores.fills, Fill(nothing, -torch.inf, -1)))
    return scores.softmaxed(axis, x.dtype)


def _reduced_axis(scores: Scores, args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
    """Return the key axis that a reduction sums over, if the axis is kept; otherwise None."""
    options = dict(zip(("dim", "keepdim"), args, strict=False)) | kwargs
    if not set(options) <= {"dim", "keepdim"} or options.get("keepdim") is not True:
        return None
    dim = options.get("dim")
    axis = _axis(scores, dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim)
    return axis if axis is not None and scores.is_keys(axis) else None


def _axis(scores: Scores, dim: Any) -> int | None:
    count = len(scores.axes.axes)
    return dim % count if isinstance(dim, int) and not isinstance(dim, bool) and -count <= dim < count else None


def _dtype_after(func: Callable[..., Any], dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of a function's result under the current autocast settings."""
    result: torch.dtype = func(torch.zeros(1, dtype=dtype, device=device)).dtype
    return result
