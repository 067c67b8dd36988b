"""LazyWeights: attention weights that a call returns without computing them; the first read computes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from saccade.engine.nested import Nested
from saccade.matrix import DENSE_LIMIT, Matrix
from saccade.statistics.row_block import as_slice
from saccade.support.errors import unsupported
from saccade.support.numerics import wide_dtype
from saccade.support.torch_modes import is_tracing

CALLED_AS = "nn.MultiheadAttention"  # the name in error messages

_LIMIT = 1 << 30  # maximum number of dense weights: 4 GB in float32
# Properties that can be read without computing the weights.
_KNOWN = {
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_nested")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, Tensor.ndimension}


_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class _Content:
    """The state of lazy attention weights: the function that computes them, and its result after the first read."""

    def __init__(self, shape: Any, dtype: Any, device: Any, make: Callable[[], Tensor], sources: Iterable[Tensor]):
        self.kind = (shape, dtype, device)
        self._make: Callable[[], Tensor] | None = make
        sources = list(sources)
        self._sources = [(x, x._version) for x in sources if not x.is_inference()]
        self.has_grad = torch.is_grad_enabled() and any(x.requires_grad for x in sources)
        self._weights: Tensor | None = None

    def read(self) -> Tensor:
        if self._weights is None:
            assert self._make is not None
            size = math.prod(self.kind[0])
            reasons = [f"the weights have {size:,} elements, shape {list(self.kind[0])}"] if size > _LIMIT else []
            if any(x._version != version for x, version in self._sources):
                reasons.append("a tensor that they depend on, such as a mask, was changed in place after the call")
            if reasons:
                hint = "saccade.record(model) records matrices without building them; or need_weights=False"
                raise unsupported("need_weights=True", reasons, hint=hint)
            with torch.set_grad_enabled(self.has_grad):
                self._weights = self._make()
            self._make, self._sources = None, []
        return self._weights


class LazyWeights(Tensor):
    """A tensor that represents attention weights without storing them; any operation runs on the dense weights.

    The weights are computed once, with gradient, on first read. Operations return ordinary tensors.

    Args:
        shape, dtype, device: properties of the weights.
        make: computes the weights.
        sources: tensors that ``make`` reads.

    Raises:
        UnsupportedError: more than 2**30 weights are read, or a source was modified in place after the call.

    Cost: none until the weights are read, except that queries and keys stay in memory.
    """

    _content: _Content

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        make: Callable[[], Tensor],
        sources: Iterable[Tensor] = (),
    ) -> Self:
        return cls._of(_Content(shape, dtype, device, make, sources))

    @classmethod
    def _of(cls, content: _Content) -> Self:
        shape, dtype, device = content.kind
        weights = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        weights._content = content
        return weights

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.requires_grad.__get__:  # type: ignore[attr-defined]  # a C++ getter
            return args[0]._content.has_grad
        if func is Tensor.detach:
            content: _Content = args[0]._content
            return cls._of(_Content(*content.kind, lambda: content.read().detach(), ()))
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = tree_map(_dense_weights, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's signature lacks the last two
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation that torch's internals call on the dense attention weights, without gradient."""
        if func in _SAME:
            return cls._of(args[0]._content)
        args, kwargs = tree_map(
            lambda x: _dense_weights(x).detach() if isinstance(x, LazyWeights) else x, (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        shape, dtype, device = self._content.kind
        return f"LazyWeights(shape={list(shape)}, {dtype}, {device})"


def _dense_weights(x: object) -> Any:
    """Return the dense attention weights of `LazyWeights`; return any other object unchanged."""
    return x._content.read() if isinstance(x, LazyWeights) else x


def weights_of(
    matrix: Matrix,
    is_averaged: bool,
    dtype: torch.dtype,
    sources: Iterable[Tensor],
    *,
    is_single: bool = False,
    items: Nested | None = None,
) -> Tensor:
    """Return the weights of a call to ``nn.MultiheadAttention``, as `LazyWeights` if there are many.

    Args:
        matrix: the matrix of the call, ``[batch, heads, q_len, kv_len]``.
        is_averaged: whether to average over the heads, which removes the head axis.
        dtype: the dtype of the weights.
        sources: tensors that the matrix reads.
        is_single: whether the inputs of the call, and therefore its weights, have no batch dimension.
        items: the nested tensors of the call, if ``matrix`` is their packed matrix. The weights of shorter items are
            padded with zeros, as in torch.
    """

    def make() -> Tensor:
        weights = _averaged(matrix) if is_averaged else matrix.to_dense(limit=_LIMIT)
        weights = (weights if items is None else _padded(weights[0], items)).to(dtype)
        return weights[0] if is_single else weights

    if math.prod(matrix.shape) <= DENSE_LIMIT:
        return make()
    if is_tracing():
        reason = f"a compiled program would have to build {math.prod(matrix.shape):,} weights"
        raise unsupported("need_weights=True", [reason], hint="need_weights=False")
    batch, heads, q_len, kv_len = matrix.shape
    if items is not None:
        batch, q_len, kv_len = items.shape
    shape = (batch, q_len, kv_len) if is_averaged else (batch, heads, q_len, kv_len)
    return LazyWeights(shape[is_single:], dtype, matrix.device, make, sources)


def _averaged(matrix: Matrix) -> Tensor:
    """Return attention weights averaged over the heads, ``[batch, q_len, kv_len]``, computed block by block."""
    batch, heads, q_len, kv_len = matrix.shape
    weights = torch.zeros(batch, q_len, kv_len, dtype=wide_dtype(matrix.dtype), device=matrix.device)
    for block in matrix.blocks():
        for span, part in block.by_range(block.weights):
            weights[block.batch, as_slice(block.rows), as_slice(span)] += part.sum(1) / heads
    return weights


def _padded(weights: Tensor, items: Nested) -> Tensor:
    """Split a packed sequence's attention weights into padded weights per item, ``[batch, ..., q_len, kv_len]``."""
    batch, q_len, kv_len = items.shape
    out = weights.new_zeros(batch, *weights.shape[:-2], q_len, kv_len)
    row = column = 0
    for item, (q_item, kv_item) in enumerate(zip(items.q_lengths, items.kv_lengths, strict=True)):
        out[item, ..., :q_item, :kv_item] = weights[..., row : row + q_item, column : column + kv_item]
        row, column = row + q_item, column + kv_item
    return out
