"""SoftmaxTap: track materialised softmax results until a model multiplies them by values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from saccade.fusion.arguments import map_nested, softmax_dim, tensors_in
from saccade.fusion.axes import Axes, Axis, new_factor
from saccade.fusion.operations import scores_after
from saccade.fusion.product_spellings import PRODUCTS, Product, product_of
from saccade.fusion.roles import roles_of
from saccade.fusion.scores import FLOATS, Scores, is_dense, version_of
from saccade.fusion.written_softmax import DIVIDE, EXP, SUM
from saccade.support.torch_modes import is_mapped

Arrange = Callable[[Tensor], Tensor]
"""A function that converts weights in the model's layout to ``[batch, heads, q_len, kv_len]``."""

_SOFTMAX = frozenset({F.softmax, F.softmin, torch.softmax, Tensor.softmax, torch.special.softmax, F.gumbel_softmax})
_ANY_PRODUCT = PRODUCTS | frozenset(
    {
        *(torch.mm, torch.mv, torch.addbmm, torch.addmm, torch.addmv, torch.tensordot, torch.chain_matmul),
        *(torch.linalg.multi_dot, Tensor.mm, Tensor.mv, Tensor.addbmm, Tensor.addmm, Tensor.addmv),
    }
)
# Functions that select, join or repeat weights. Their results are tracked whatever their size; results of other
# functions are tracked only if they have as many elements as the weights.
_PARTS = frozenset(
    {
        *("__getitem__", "select", "narrow", "index_select", "gather", "take_along_dim", "chunk", "split", "unfold"),
        *("split_with_sizes", "tensor_split", "unbind", "as_strided", "cat", "concat", "stack", "expand", "expand_as"),
        *("broadcast_to", "repeat", "repeat_interleave", "tile", "pad", "constant_pad_nd"),
    }
)
_MEAN = frozenset({torch.mean, Tensor.mean, torch.nanmean, Tensor.nanmean})
# Functions that change weights but not their axes, either elementwise or by a normalisation. Leading and trailing
# underscores are stripped from names: "iadd" is ``__iadd__``, and "mul" includes ``mul_``.
_ELEMENTWISE = frozenset(
    {
        *("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "div", "true_divide", "truediv"),
        *("itruediv", "idiv", "pow", "clamp", "clamp_min", "clamp_max", "clip", "maximum", "minimum", "nan_to_num"),
        *("masked_fill", "where", "exp", "abs", "neg", "relu", "square", "sqrt", "lerp", "normalize", "dropout"),
        *("alpha_dropout", "feature_dropout"),
        *("layer_norm", "batch_norm", "group_norm", "instance_norm", "rms_norm"),
    }
)
_UNCHANGING = frozenset({"dropout", "alpha_dropout", "feature_dropout"})
_MULTIPLYING = frozenset({"mul", "rmul", "imul", "div", "true_divide", "truediv", "itruediv", "idiv"})


class SoftmaxTap:
    """A tracker that reports dense attention weights when they are multiplied by values.

    Weights are tracked through casts, views, dropout, elementwise changes, such as masks or a normalisation after the
    softmax, and layers that mix heads. The product must sum over the axis of the softmax, or over an axis along which
    the weights now sum to 1 (slot attention: a softmax over the queries, normalised over the keys). If both operands of
    a product are weights, only those unchanged since their softmax are reported. If a model selects or joins weights,
    their layout becomes unknown, and ``on_unknown`` is called for their products.

    Args:
        on_weights: called before the product as ``on_weights(weights, arrange)``, with the weights in the model's
            layout and the function that converts them to ``[batch, heads, q_len, kv_len]``.
        on_unknown: called for every other product with a tensor derived from a softmax.
    """

    def __init__(self, on_weights: Callable[[Tensor, Arrange], None], on_unknown: Callable[[], None] = lambda: None):
        self._on_weights, self._on_unknown = on_weights, on_unknown
        self._states: Any = WeakTensorKeyDictionary()
        self._exponentials: Any = WeakTensorKeyDictionary()  # with their versions
        self._sums: Any = WeakTensorKeyDictionary()  # of exponentials: version, exponentials, dimension

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a torch call, tracking softmax results among its arguments."""
        tracked = [x for x in tensors_in((args, kwargs)) if x in self._states] if self._states else []
        mixing = self._head_mixing_axes(func, args, kwargs) if tracked else None
        if tracked and mixing is None and (func in _ANY_PRODUCT or _is_linear_with_activations(func, args)):
            self._report_product(func, args, kwargs)
            return func(*args, **kwargs)
        state = self._state_after(func, args, kwargs) if tracked and func not in _SOFTMAX else None
        sizes = {x.numel() for x in tracked}
        out = func(*args, **kwargs)
        if func in _SOFTMAX and is_dense(out):
            self.track(out, softmax_dim(func, args, kwargs, out.dim()))
        elif mixing is not None and is_dense(out):
            self._states[out] = _State(_as_scores(out, *mixing), version_of(out), is_changed=True)
        elif tracked and func in _MEAN and self._keeps_keys(args, kwargs):
            self.track_unknown(out)
        elif tracked:
            self._track_result(func, args[0] if out is None and args else out, state, sizes)
        self._follow_exponentials(func, args, kwargs, out)
        return out

    def _follow_exponentials(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Track weights that a model normalises itself: exponentials divided by their sum over an axis."""
        first = args[0] if args else None
        if func in EXP and is_dense(out):
            self._exponentials[out] = version_of(out)
        elif func in SUM and first is not None and self._is_exponential(first):
            options = dict(zip(("dim", "keepdim"), args[1:], strict=False)) | kwargs
            dim = options.get("dim")
            dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
            if options.get("keepdim") is True and isinstance(dim, int):
                self._sums[out] = version_of(out), weakref.ref(first), dim
        elif func in DIVIDE and len(args) == 2 and isinstance(args[1], Tensor) and args[1] in self._sums:
            version, divided, dim = self._sums[args[1]]
            if divided() is first and version == version_of(args[1]) and self._is_exponential(first) and is_dense(out):
                self.track(out, dim)

    def _is_exponential(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x in self._exponentials and self._exponentials[x] == version_of(x)

    def track(self, x: Tensor, dim: Any) -> None:
        """Start tracking ``x``, the result of a softmax over the dimension ``dim``."""
        if isinstance(dim, int) and x.dtype in FLOATS and x.dim() and x.shape[dim] > 1:
            self._states[x] = _State(_as_scores(x, dim % x.dim()), version_of(x))

    def track_unknown(self, x: Tensor) -> None:
        """Start tracking ``x``, weights of an unknown layout or without a normalisation."""
        self._states[x] = _State(None, 0)

    def is_tracking(self, arguments: tuple[Any, Any]) -> bool:
        """Return whether an argument of a matrix product is derived from a softmax."""
        return bool(self._states) and any(x in self._states for x in tensors_in(arguments))

    def _state_after(self, func: Any, args: Any, kwargs: Any) -> _State | None:
        """Return the state that the result of a call on tracked weights will have, or None if it is unknown.

        The version in this state is 0, because the result does not exist yet.
        """
        known_args, known_kwargs = map_nested(self._known, (args, kwargs))
        tracked_weights = [x for x in _items((args, kwargs)) if isinstance(self._known(x), Scores)]
        if not tracked_weights:
            return None
        name, is_changed = str(getattr(func, "__name__", "")).strip("_"), self._states[tracked_weights[0]].is_changed
        if name not in _ELEMENTWISE:
            scores = scores_after(func, known_args, known_kwargs)
            return _State(scores, 0, is_changed) if isinstance(scores, Scores) else None
        # If a float tensor of the same shape is multiplied, the softmax may be a gate for activations.
        scores = self._known(tracked_weights[0])
        shape = tuple(scores.axes.shape)
        others = [x for x in tensors_in((args, kwargs)) if self._known(x) is x and x.is_floating_point()]
        is_gate = name in _MULTIPLYING and any(tuple(x.shape) == shape for x in others)
        return None if is_gate else _State(scores, 0, is_changed or name not in _UNCHANGING)

    def _keeps_keys(self, args: Any, kwargs: Any) -> bool:
        """Return whether a mean of weights is over other axes than the keys, such as the heads."""
        weights = self._known(args[0]) if args else None
        dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if not isinstance(weights, Scores) or weights.softmax not in weights.axes.axes or dims is None:
            return False
        axes = weights.axes.axes
        dims = dims if isinstance(dims, tuple | list) else (dims,)
        return axes.index(weights.softmax) not in {dim % len(axes) for dim in dims}

    def _head_mixing_axes(self, func: Any, args: Any, kwargs: Any) -> tuple[int, int | None] | None:
        """Return the key axis and the query axis in the result of a call that mixes heads; None for other calls.

        The query axis is None if there is only one query.
        """
        known_args, known_kwargs = map_nested(self._known, (args, kwargs))
        weights = next((x for x in _items((known_args, known_kwargs)) if isinstance(x, Scores)), None)
        if weights is None or func not in (*PRODUCTS, F.linear, F.conv2d):
            return None
        axes, rows = weights.axes.axes, weights.left_only
        if weights.softmax not in axes or (rows and rows not in axes):
            return None
        column, row = axes.index(weights.softmax), axes.index(rows) if rows else None
        if func in PRODUCTS:
            product = product_of(func, known_args, known_kwargs)
            return None if product is None else _axes_in_product(product, weights, column, row)
        if known_args[:1] != (weights,):
            return None
        if func is F.linear:
            return (column, row) if len(axes) - 1 not in (column, row) else None
        is_kept = len(axes) == 4 and column in (2, 3) and row in (2, 3, None)
        return (column, row) if is_kept and _keeps_size(*args, **kwargs) else None

    def _track_result(self, func: Any, out: Any, state: _State | None, sizes: set[int]) -> None:
        name = str(getattr(func, "__name__", ""))
        for x in tensors_in((out,)):
            if is_dense(x) and state is not None and tuple(x.shape) == tuple(state.scores.axes.shape):  # type: ignore[union-attr]
                self._states[x] = state._replace(version=version_of(x))
            elif name in _PARTS or name == "__setitem__" or x.numel() in sizes:
                self._states[x] = _State(None, 0)

    def _report_product(self, func: Any, args: Any, kwargs: Any) -> None:
        """Report the tracked weights that a product multiplies by values, or report that their layout is unknown."""
        known_args, known_kwargs = map_nested(self._known, (args, kwargs))
        product = product_of(func, known_args, known_kwargs) if func in PRODUCTS else None
        tracked_weights = [x for x in tensors_in((args, kwargs)) if isinstance(self._known(x), Scores)]
        multiplied = {} if product is None else {x: _multiplied(x, self._states[x], product) for x in tracked_weights}
        weights = {x: scores for x, scores in multiplied.items() if scores is not None}
        unchanged = {x: scores for x, scores in weights.items() if not self._states[x].is_changed}
        for x, scores in (unchanged or weights).items():
            self._report(x, scores)
        if not weights:
            self._on_unknown()

    def _known(self, x: Any) -> Any:
        """Return the `Scores` of tracked weights; return any other argument unchanged."""
        if not isinstance(x, Tensor) or x not in self._states:
            return x
        state = self._states[x]
        return state.scores if state.scores is not None and state.version == version_of(x) else x

    def _report(self, x: Tensor, weights: Scores) -> None:
        every = weights.all_factors
        roles = roles_of(weights, weights.softmax or (), set())
        assert roles is not None

        def arrange(weights_in_layout: Tensor) -> Tensor:
            return roles.to_four_dims(weights.axes.by_factor(weights_in_layout, every), every)

        self._on_weights(x, arrange)


class _State(NamedTuple):
    """The state of a tracked tensor.

    Args:
        scores: the tensor's axes; None if they are unknown.
        version: the tensor's version counter when the axes were determined.
        is_changed: whether anything except dropout and casts has changed the weights since the softmax.
    """

    scores: Scores | None
    version: int
    is_changed: bool = False


def _multiplied(x: Tensor, state: _State, product: Product) -> Scores | None:
    """Return weights whose key axis is the axis that a product sums over; None if they do not multiply values."""
    weights = state.scores
    assert weights is not None
    names, others = product.left_letters, product.right_letters
    names, others, other = (names, others, product.right) if weights is product.left else (others, names, product.left)
    axes = dict(zip(names, weights.axes.axes, strict=True))
    columns = tuple(factor for name in names if name in product.summed for factor in axes[name])
    is_softmax = bool(columns) and set(columns) == set(weights.softmax or ())
    if not is_softmax:
        dims = [names.index(name) for name in product.summed]
        if not (columns and state.is_changed and _sums_to_one(x, dims)):
            return None
    sizes = dict(zip(others, other.axes.shape if isinstance(other, Scores) else other.shape, strict=True))
    unshared = [axis for name, axis in axes.items() if axis and sizes.get(name, 1) == 1 and name not in product.summed]
    rows = unshared[0] if len(unshared) == 1 else weights.left_only
    return _with_roles(weights, () if set(rows) & set(columns) else rows, columns)


def _with_roles(weights: Scores, rows: Axis, columns: Axis) -> Scores:
    """Assign query and key factors (sub-axes) to weights; all other factors become batch factors."""
    if (rows, columns) == (weights.left_only, weights.softmax):
        return weights
    batch = tuple(factor for axis in weights.axes.axes for factor in axis if factor not in (*rows, *columns))
    last = [axis for axis in weights.axes.axes if axis and set(axis) <= set(batch)]
    left, right = (weights.left.new_empty((1,) * (len(batch) + len(side)) + (0,)) for side in (rows, columns))
    heads = last[-1] if len(last) > 1 else ()
    return replace(
        weights, left=left, right=right, batch=batch, left_only=rows, right_only=columns, heads=heads, lead=batch,
        softmax=columns,
    )  # fmt: skip


def _is_linear_with_activations(func: Any, args: Any) -> bool:
    """Return whether a call is a product by ``F.linear`` of two tensors of which none is a layer's parameter."""
    return func is F.linear and len(args) > 1 and not isinstance(args[1], torch.nn.Parameter)


def _sums_to_one(x: Tensor, dims: list[int]) -> bool:
    if is_mapped(x):
        return False
    sums = x.detach().double().sum(dims)
    return bool(((sums - 1.0).abs() < 1e-3).all())


def _axes_in_product(product: Product, weights: Scores, column: int, row: int | None) -> tuple[int, int | None] | None:
    """Return the key axis and the query axis in a product that mixes heads of weights; None for other products."""
    names, others = product.left_letters, product.right_letters
    names, others, other = (names, others, product.right) if weights is product.left else (others, names, product.left)
    kept = [names[axis] for axis in (column, row) if axis is not None]
    if isinstance(other, Scores) or set(kept) & set(others) or not set(kept) <= set(product.letters):
        return None
    positions = [product.letters.index(name) for name in kept]
    return positions[0], None if row is None else positions[1]


def _keeps_size(
    x: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, *_: Any, **__: Any
) -> bool:
    """Return whether a convolution of weights returns one output per query-key pair, so that its axes are unchanged."""
    return stride in (1, (1, 1)) and (padding == "same" or weight.shape[-2:] == (1, 1))


def _items(tree: Any) -> Iterator[Any]:
    """Yield the items in the nested arguments of a torch call."""
    for x in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(x, tuple | list | dict):
            yield from _items(x)
        else:
            yield x


def _as_scores(x: Tensor, softmax_axis: int, row_axis: int | None = None) -> Scores:
    """Represent dense softmax weights as `Scores` with empty operands, to track their axes through operations.

    If the query axis is unknown, assume that it is the axis before the keys.
    """
    factors = [new_factor() if size > 1 else None for size in x.shape]
    axes = tuple(() if factor is None else (factor,) for factor in factors)
    columns = axes[softmax_axis]
    before = softmax_axis - 1 if softmax_axis else softmax_axis + 1
    rows = axes[before if row_axis is None else row_axis] if x.dim() > 1 else ()
    others = [axis for axis in axes if axis not in (rows, columns)]
    batch = tuple(factor for axis in others for factor in axis)
    heads = others[-1] if len(others) > 1 else ()
    sizes = {factor: size for factor, size in zip(factors, x.shape, strict=True) if factor is not None}
    left, right = (x.new_empty((1,) * (len(batch) + len(side)) + (0,)) for side in (rows, columns))
    return Scores(Axes(sizes, axes), left, right, batch, rows, columns, heads, batch, x.dtype, x.dtype, softmax=columns)
