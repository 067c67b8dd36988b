"""Capture modules that call torch's attention functions directly (timm, diffusers, …), and note handwritten ones."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from saccade.engine.inputs import AttentionInputs
from saccade.engine.nested import Nested, is_nested
from saccade.integrations.capture_context import Capture, Listener, emit_all, names_of, uses_attention_interface
from saccade.integrations.forward_proxy import CapturedCall, Running, capture_forwards
from saccade.integrations.layer_matrix import function_matrix
from saccade.integrations.tensor_masks import rule_of_tensor
from saccade.masks import Causal
from saccade.masks.convert.as_mask import starts_at_first_key
from saccade.matrix import AttentionMatrix, Impl, matrix_from_inputs
from saccade.matrix.functions import OBSERVERS
from saccade.support.errors import unsupported
from saccade.support.validation import is_causal_bias

CALLED_AS = "record"  # the name in error messages

_NAMED = frozenset({"softmax", "Softmax", "scaled_dot_product_attention", "multi_head_attention_forward"})
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@contextmanager
def capture_products(model: nn.Module, capture: Capture) -> Iterator[None]:
    """Capture each call of an attention function that a module of ``model`` makes, under the module's name.

    The functions are ``F.scaled_dot_product_attention``, ``F.multi_head_attention_forward``, `saccade.attention` and
    `saccade.attention_with_lse`. If a module calls them several times in one forward pass, the second call is named
    after the module with ":1" appended, and so on. A module that multiplies the result of a softmax is noted as not
    recordable. Layers of torch and of this library are captured elsewhere.
    """
    modules = [(module, name, _capture_calls) for module, name in names_of(model).items() if not _is_known(module)]
    with capture_forwards(modules, capture):
        observer = functools.partial(_capture_attention, capture)
        OBSERVERS.append(observer)
        try:
            yield
        finally:
            OBSERVERS.remove(observer)


def without_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to run without the capture's mode, because torch's layers leave their fast path under a mode."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        stack = reversed(torch.overrides._get_current_function_mode_stack())
        # Only the topmost modes can be removed. If another library's mode is above ours, the fast path is off anyway.
        modes = list(itertools.takewhile(lambda mode: isinstance(mode, _Mode), stack))
        for mode in modes:
            mode.__exit__(None, None, None)
        try:
            return function(*args, **kwargs)
        finally:
            for mode in reversed(modes):
                mode.__enter__()

    return run


@dataclass
class _Caller:
    """A running module that may call torch's attention functions, with one of its listeners.

    Attributes:
        listener: the capture and the module's name in it.
        kind: the name of the module's class.
        calls: number of calls of attention functions so far.
    """

    listener: Listener
    kind: str
    calls: int = 0


_SOFTMAX: frozenset[Callable[..., Any]] = frozenset(
    {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax, F.gumbel_softmax}
)
_PRODUCTS = frozenset(
    {
        *(torch.matmul, torch.bmm, torch.mm, torch.mv, torch.baddbmm, torch.addbmm, torch.addmm, torch.addmv),
        *(torch.einsum, torch.tensordot, torch.chain_matmul, torch.linalg.multi_dot),
        *(Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.bmm, Tensor.mm, Tensor.mv),
        *(Tensor.baddbmm, Tensor.addbmm, Tensor.addmm, Tensor.addmv),
    }
)
# Functions that select, join or repeat weights. The result of any other function counts as weights if it has the
# same number of elements.
_PARTS = frozenset(
    {
        *("__getitem__", "select", "narrow", "index_select", "gather", "take_along_dim", "chunk", "split", "unfold"),
        *("split_with_sizes", "tensor_split", "unbind", "as_strided", "cat", "concat", "stack", "expand", "expand_as"),
        *("broadcast_to", "repeat", "repeat_interleave", "tile", "pad", "constant_pad_nd"),
    }
)


class SoftmaxProducts:
    """A tracker that follows softmax results through casts, views, dropout, masking and other elementwise operations.

    Each thread tracks its own results by weak references. The softmax of a classifier or router is not reported,
    because its weights are multiplied elementwise and do not enter a matrix product.

    Cost: a lookup of the arguments of each operation while a tracked tensor is alive.
    """

    def __init__(self) -> None:
        self._thread = _ThreadState()

    def is_one(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
        """Track the results of an operation, and return whether it was a matrix product with a softmax result."""
        weights = self._thread.weights
        if func in _SOFTMAX:
            weights[out] = True
            return False
        if not weights:
            return False
        entering = [x for x in _tensors(args, kwargs) if x in weights]
        if not entering:
            return False
        if func in _PRODUCTS:
            return True
        name = getattr(func, "__name__", "")
        if name == "__setitem__":
            weights[args[0]] = True
        sizes = {x.numel() for x in entering}
        for x in _tensors((out,), {}):
            if name in _PARTS or x.numel() in sizes:
                weights[x] = True
        return False


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.weights: Any = WeakIdKeyDictionary()


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, tuple | list):
            yield from (leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor))


_running = Running()
_softmax_products = SoftmaxProducts()


class _Mode(TorchFunctionMode):
    """A torch function mode that captures the calls of torch's attention functions while a recorded module runs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            arguments = dict(zip(_NAMES, args, strict=False)) | kwargs
            emit_all([(listener, lambda: _matrix(arguments)) for listener in _listeners()])
        elif func is F.multi_head_attention_forward:
            emit_all([(listener, lambda: function_matrix(args, kwargs)) for listener in _listeners()])
        elif _softmax_products.is_one(func, args, kwargs, out) and not _is_ours(sys._getframe(1)):
            for one in _innermost_callers():
                one.listener.capture.note_not_recorded(one.listener.name, one.kind)
        return out


_MODE = _Mode()


@contextmanager
def capture_products_of(module: nn.Module, listeners: Iterable[Listener]) -> Iterator[None]:
    """Capture calls of torch's attention functions within the block, under the name of the given module."""
    is_on = _MODE in torch.overrides._get_current_function_mode_stack()
    kind = type(module).__name__
    with _running.within(*(_Caller(listener, kind) for listener in listeners)), nullcontext() if is_on else _MODE:
        yield


def _capture_attention(capture: Capture, inputs: AttentionInputs, impl: Impl) -> None:
    """Capture a call of `saccade.attention` by a third-party module; this library's layers are captured elsewhere."""
    if not _called_by_library(sys._getframe(1)):
        emit_all([(listener, lambda: matrix_from_inputs(inputs, impl)) for listener in _listeners(capture)])


def _called_by_library(frame: FrameType | None) -> bool:
    """Return whether the caller of `saccade.attention` is a module of this library."""
    inside = ("saccade.matrix.functions", "saccade.support.argument_hints", __name__)
    while frame is not None and frame.f_globals.get("__name__") in inside:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith("saccade.")


def _capture_calls(call: CapturedCall) -> Any:
    with capture_products_of(call.module, call.listeners):
        return call.run()


def _is_ours(frame: FrameType | None) -> bool:
    """Return whether an SDPA call comes from a saccade kernel, whose matrix is already captured."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("saccade.engine."):
            return True
        frame = frame.f_back
    return False


def _innermost_callers() -> list[_Caller]:
    """Return, for each capture, the innermost running module that may call SDPA."""
    return list({one.listener.capture: one for one in _running.stack}.values())


def _listeners(only: Capture | None = None) -> list[Listener]:
    """Return a listener for each capture, or only for the given capture, named after the innermost running module."""
    listeners = []
    for one in _innermost_callers():
        name, capture = one.listener
        if only in (None, capture):
            listeners.append(Listener(f"{name}:{one.calls}" if one.calls else name, capture))
            one.calls += 1
    return listeners


def _matrix(arguments: dict[str, Any]) -> AttentionMatrix:
    """Return the matrix of a call of torch's SDPA, with leading dimensions flattened into the batch."""
    query, key = arguments["query"], arguments["key"]
    if is_nested(query, key):
        return _nested_matrix(query, key, arguments)
    shape = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3])
    heads = query.shape[-3] if query.dim() > 2 else 1
    query, key = (_four(x, shape) for x in (query, key))
    q_len, kv_len = query.shape[2], key.shape[2]
    mask, scale = arguments.get("attn_mask"), arguments.get("scale")
    is_causal_object = is_causal_bias(mask)
    if arguments.get("is_causal") or (is_causal_object and starts_at_first_key(mask)):
        # With torch's flag, query 0 may attend only to key 0, whatever the lengths.
        rows, columns = range(q_len), range(kv_len)
        return AttentionMatrix(query, key, Causal(), scale=scale, q_positions=rows, kv_positions=columns)
    if mask is None or is_causal_object:
        return AttentionMatrix(query, key, None if mask is None else Causal(), scale=scale)
    mask = mask.expand(torch.broadcast_shapes(mask.shape, (q_len, kv_len))) if mask.dim() < 2 else mask
    if mask.dim() > 4 or (mask.dim() == 4 and len(shape) != 1):
        mask = mask.expand(*shape, heads, *mask.shape[-2:]).reshape(-1, heads, *mask.shape[-2:])
    mask = mask[(None,) * (4 - mask.dim())]
    rule, bias = rule_of_tensor(mask, kv_len)
    return AttentionMatrix(query, key, rule, bias=bias, scale=scale)


def _nested_matrix(query: Tensor, key: Tensor, arguments: dict[str, Any]) -> AttentionMatrix:
    """Return the packed matrix of a call of torch's SDPA on nested tensors, for which torch accepts no mask."""
    items, is_causal = Nested.of(query, key, key, axis=1), bool(arguments.get("is_causal"))
    if is_causal and items.q_lengths != items.kv_lengths:
        reason = "is_causal=True with nested queries and keys of different lengths depends on torch's kernel"
        raise unsupported(
            "scaled_dot_product_attention",
            [reason],
            hint="dense tensors, or saccade.attention(..., masks.Causal())",
        )
    rule = items.mask(Causal() if is_causal else None, items.query.shape[1])
    places: dict[str, Any] = {**items.positions}
    return AttentionMatrix(items.query, items.key, rule, scale=arguments.get("scale"), **places)


def _four(x: Tensor, shape: torch.Size) -> Tensor:
    """Flatten the leading dimensions of an SDPA input ``[..., heads, len, head_dim]`` into one."""
    x = x if x.dim() > 2 else x[None]
    return x.expand(*shape, *x.shape[-3:]).reshape(-1, *x.shape[-3:])


def _is_known(module: nn.Module) -> bool:
    return (
        type(module).__module__.startswith(("torch.", "saccade."))
        or isinstance(module, torch.jit.ScriptModule)
        or inspect.isbuiltin(module.forward)
        or (uses_attention_interface(module) and not _may_attend_itself(module))
    )


def _may_attend_itself(module: nn.Module) -> bool:
    """Return whether a class uses a softmax or a torch function directly, although its file uses the interface."""
    bases = itertools.takewhile(lambda base: base is not nn.Module, type(module).__mro__)
    functions = (inspect.unwrap(one) for base in bases for one in vars(base).values() if inspect.isfunction(one))
    has_softmax = any(isinstance(part, nn.Softmax) for part in module.children())
    return has_softmax or any(not _NAMED.isdisjoint(one.__code__.co_names) for one in functions)
