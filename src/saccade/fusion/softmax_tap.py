"""SoftmaxTap: follow the computed result of a softmax until it is multiplied by values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from saccade.fusion.arguments import mapped, tensors_in
from saccade.fusion.attention_call import roles_of
from saccade.fusion.axes import Axes, new_factor
from saccade.fusion.operations import followed
from saccade.fusion.products import PRODUCTS, Product, product_of
from saccade.fusion.scores import FLOATS, Scores, is_dense, version_of

_SOFTMAX = frozenset({F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax})


class SoftmaxTap:
    """A tracker that reports dense attention weights when they are multiplied by values.

    Args:
        on_weights: called with the weights before the multiplication, ``[batch, heads, q_len, kv_len]``.
    """

    def __init__(self, on_weights: Callable[[Tensor], None]):
        self._on_weights = on_weights
        self._states: Any = WeakTensorKeyDictionary()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a torch call, tracking softmax results among its arguments."""
        is_used = self.knows((args, kwargs))
        noted_args, noted_kwargs = mapped(self._state, (args, kwargs)) if is_used else (args, kwargs)
        out = func(*args, **kwargs)
        if func in _SOFTMAX and is_dense(out):
            self.follow(out, kwargs.get("dim", args[1] if len(args) > 1 else None))
        elif is_used and func in PRODUCTS:
            product = product_of(func, noted_args, noted_kwargs)
            for x in tensors_in((args, kwargs)):
                weights = self._state(x)
                if product is not None and isinstance(weights, Scores):
                    self._report(x, weights, product)
        elif is_used and is_dense(out):
            scores = followed(func, noted_args, noted_kwargs)
            if scores is not None:
                self._states[out] = scores, version_of(out)
        return out

    def follow(self, x: Tensor, dim: Any) -> None:
        """Start tracking a tensor that is the result of a softmax over a dimension."""
        if isinstance(dim, int) and x.dtype in FLOATS and x.shape[dim] > 1:
            self._states[x] = _as_scores(x, dim % x.dim()), version_of(x)

    def knows(self, arguments: tuple[Any, Any]) -> bool:
        """Return whether an argument of a matrix product is a tracked softmax result."""
        return bool(self._states) and any(isinstance(self._state(x), Scores) for x in tensors_in(arguments))

    def _state(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x not in self._states:
            return x
        scores, version = self._states[x]
        return scores if version == version_of(x) else x

    def _report(self, x: Tensor, weights: Scores, product: Product) -> None:
        names = product.left_letters if weights is product.left else product.right_letters
        columns = [axis for name, axis in zip(names, weights.axes.axes, strict=True) if name in product.summed]
        if len(columns) == 1 and set(columns[0]) == set(weights.softmax or ()):
            every = weights.all_factors
            roles = roles_of(weights, columns[0], set())
            assert roles is not None
            with torch.no_grad():
                self._on_weights(roles.four(weights.axes.by_factor(x.detach(), every), every))


def _as_scores(x: Tensor, softmax_axis: int) -> Scores:
    """Represent dense softmax weights by `Scores` with empty operands, to track their axes through operations."""
    factors = [new_factor() if size > 1 else None for size in x.shape]
    axes = tuple(() if one is None else (one,) for one in factors)
    columns = axes[softmax_axis]
    rows = axes[softmax_axis - 1 if softmax_axis else softmax_axis + 1] if x.dim() > 1 else ()
    items, *heads = [axis for axis in axes if axis not in (rows, columns)] or [()]
    others = tuple(one for axis in heads for one in axis)
    batch = (*items, *others)
    sizes = {one: size for one, size in zip(factors, x.shape, strict=True) if one is not None}
    left, right = (x.new_empty((1,) * (len(batch) + len(own)) + (0,)) for own in (rows, columns))
    return Scores(
        Axes(sizes, axes), left, right, batch, rows, columns, others, batch, x.dtype, x.dtype, softmax=columns
    )
