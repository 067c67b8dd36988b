"""SoftmaxTap: follow the computed result of a softmax until it is multiplied by values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

Arrange = Callable[[Tensor], Tensor]
"""Converts weights in the model's layout to ``[batch, heads, q_len, kv_len]``."""

_SOFTMAX = frozenset({F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax, F.gumbel_softmax})
_ANY_PRODUCT = PRODUCTS | frozenset(
    {
        *(torch.mm, torch.mv, torch.addbmm, torch.addmm, torch.addmv, torch.tensordot, torch.chain_matmul),
        *(torch.linalg.multi_dot, Tensor.mm, Tensor.mv, Tensor.addbmm, Tensor.addmm, Tensor.addmv),
    }
)
# Functions that select, join or repeat weights. The result of any other function depends on weights in a way that
# matters if it has the same number of elements.
_PARTS = frozenset(
    {
        *("__getitem__", "select", "narrow", "index_select", "gather", "take_along_dim", "chunk", "split", "unfold"),
        *("split_with_sizes", "tensor_split", "unbind", "as_strided", "cat", "concat", "stack", "expand", "expand_as"),
        *("broadcast_to", "repeat", "repeat_interleave", "tile", "pad", "constant_pad_nd"),
    }
)
# Functions that change each weight by itself, so that the axes of the result are those of the weights. Names have no
# underscores: "iadd" is ``__iadd__``, "mul" is also ``mul_``.
_ELEMENTWISE = frozenset(
    {
        *("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "div", "true_divide", "truediv"),
        *("itruediv", "idiv", "pow", "clamp", "clamp_min", "clamp_max", "clip", "maximum", "minimum", "nan_to_num"),
        *("masked_fill", "where", "exp", "abs", "neg", "relu", "square", "sqrt", "lerp", "normalize", "dropout"),
        *("alpha_dropout", "feature_dropout"),
    }
)
_MULTIPLYING = frozenset({"mul", "rmul", "imul", "div", "true_divide", "truediv", "itruediv", "idiv"})


class SoftmaxTap:
    """A tracker that reports dense attention weights when they are multiplied by values.

    Weights are followed through casts, views, dropout and elementwise changes, such as masks or a normalisation after
    the softmax. Of weights that are selected, joined or mixed, the layout is unknown; their products are only noted.

    Args:
        on_weights: called before the product as ``on_weights(weights, arrange)``: the weights as the model multiplies
            them, and the function that arranges them as ``[batch, heads, q_len, kv_len]``.
        on_unknown: called for each other product with a result of a softmax.
    """

    def __init__(self, on_weights: Callable[[Tensor, Arrange], None], on_unknown: Callable[[], None] = lambda: None):
        self._on_weights, self._on_unknown = on_weights, on_unknown
        self._states: Any = WeakTensorKeyDictionary()

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a torch call, tracking softmax results among its arguments."""
        tracked = [x for x in tensors_in((args, kwargs)) if x in self._states] if self._states else []
        if tracked and func in _ANY_PRODUCT:
            self._enter(func, args, kwargs)
            return func(*args, **kwargs)
        scores = self._scores_after(func, args, kwargs) if tracked and func not in _SOFTMAX else None
        sizes = {x.numel() for x in tracked}
        out = func(*args, **kwargs)
        if func in _SOFTMAX and is_dense(out):
            self.follow(out, kwargs.get("dim", args[1] if len(args) > 1 else None))
        elif tracked:
            self._follow_result(func, args[0] if out is None and args else out, scores, sizes)
        return out

    def follow(self, x: Tensor, dim: Any) -> None:
        """Start tracking a tensor that is the result of a softmax over a dimension."""
        if isinstance(dim, int) and x.dtype in FLOATS and x.dim() and x.shape[dim] > 1:
            self._states[x] = _as_scores(x, dim % x.dim()), version_of(x)

    def knows(self, arguments: tuple[Any, Any]) -> bool:
        """Return whether an argument of a matrix product is a result of a softmax, or was computed from one."""
        return bool(self._states) and any(x in self._states for x in tensors_in(arguments))

    def _scores_after(self, func: Any, args: Any, kwargs: Any) -> Scores | None:
        """Return the axes of the result of a call on tracked weights; None if they are not known."""
        known_args, known_kwargs = mapped(self._state, (args, kwargs))
        found = [x for x in _items((known_args, known_kwargs)) if isinstance(x, Scores)]
        if not found:
            return None
        name = str(getattr(func, "__name__", "")).strip("_")
        if name not in _ELEMENTWISE:
            return followed(func, known_args, known_kwargs)
        # A float tensor of the same shape that is multiplied may be an activation that the softmax gates.
        shape = tuple(found[0].axes.shape)
        others = [x for x in tensors_in((args, kwargs)) if self._state(x) is x and x.is_floating_point()]
        is_gate = name in _MULTIPLYING and any(tuple(x.shape) == shape for x in others)
        return None if is_gate else found[0]

    def _follow_result(self, func: Any, out: Any, scores: Scores | None, sizes: set[int]) -> None:
        name = str(getattr(func, "__name__", ""))
        for x in tensors_in((out,)):
            if is_dense(x) and scores is not None and tuple(x.shape) == tuple(scores.axes.shape):
                self._states[x] = scores, version_of(x)
            elif name in _PARTS or name == "__setitem__" or x.numel() in sizes:
                self._states[x] = None, 0

    def _enter(self, func: Any, args: Any, kwargs: Any) -> None:
        """Report the weights among the arguments of a product, or note that their layout is unknown."""
        known_args, known_kwargs = mapped(self._state, (args, kwargs))
        product = product_of(func, known_args, known_kwargs) if func in PRODUCTS else None
        reported = False
        for x in tensors_in((args, kwargs)):
            weights = self._state(x)
            if product is not None and isinstance(weights, Scores):
                reported |= self._report(x, weights, product)
        if not reported:
            self._on_unknown()

    def _state(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x not in self._states:
            return x
        scores, version = self._states[x]
        return scores if scores is not None and version == version_of(x) else x

    def _report(self, x: Tensor, weights: Scores, product: Product) -> bool:
        names = product.left_letters if weights is product.left else product.right_letters
        columns = [axis for name, axis in zip(names, weights.axes.axes, strict=True) if name in product.summed]
        if len(columns) != 1 or set(columns[0]) != set(weights.softmax or ()):
            return False
        every = weights.all_factors
        roles = roles_of(weights, columns[0], set())
        assert roles is not None

        def arrange(weights_in_layout: Tensor) -> Tensor:
            return roles.four(weights.axes.by_factor(weights_in_layout, every), every)

        self._on_weights(x, arrange)
        return True


def _items(tree: Any) -> Iterator[Any]:
    """Yield the items in the nested arguments of a torch call."""
    for x in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(x, tuple | list | dict):
            yield from _items(x)
        else:
            yield x


def _as_scores(x: Tensor, softmax_axis: int) -> Scores:
    """Represent dense softmax weights by `Scores` with empty operands, to track their axes through operations."""
    factors = [new_factor() if size > 1 else None for size in x.shape]
    axes = tuple(() if one is None else (one,) for one in factors)
    columns = axes[softmax_axis]
    rows = axes[softmax_axis - 1 if softmax_axis else softmax_axis + 1] if x.dim() > 1 else ()
    others = [axis for axis in axes if axis not in (rows, columns)]
    batch = tuple(one for axis in others for one in axis)
    heads = others[-1] if len(others) > 1 else ()
    sizes = {one: size for one, size in zip(factors, x.shape, strict=True) if one is not None}
    left, right = (x.new_empty((1,) * (len(batch) + len(own)) + (0,)) for own in (rows, columns))
    return Scores(Axes(sizes, axes), left, right, batch, rows, columns, heads, batch, x.dtype, x.dtype, softmax=columns)
