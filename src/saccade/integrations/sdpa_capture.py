"""The tap of modules that call torch's attention functions themselves (timm, diffusers, …), or write attention out."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from saccade.engine.inputs import AttentionInputs
from saccade.engine.nested import Nested, is_nested
from saccade.integrations.capture_context import Ear, Valve, hand_out, names_of, speaks_attention_interface
from saccade.integrations.forward_proxy import HeardCall, Running, listening
from saccade.integrations.layer_matrix import function_matrix
from saccade.integrations.softmax_products import SoftmaxProducts
from saccade.integrations.tensor_masks import rule_of_tensor
from saccade.masks import Causal
from saccade.masks.convert.as_mask import starts_at_first_key
from saccade.matrix import AttentionMatrix, Impl, matrix_from_inputs
from saccade.matrix.functions import OBSERVERS
from saccade.support.errors import unsupported
from saccade.support.validation import is_causal_bias

CALLED_AS = "record"  # in errors

_NAMED = frozenset({"softmax", "Softmax", "scaled_dot_product_attention", "multi_head_attention_forward"})
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@contextmanager
def tapped_products(model: nn.Module, valve: Valve) -> Iterator[None]:
    """Hand out each call of an attention function that a module of ``model`` makes, under its name.

    The functions are ``F.scaled_dot_product_attention``, ``F.multi_head_attention_forward``, `saccade.attention` and
    `saccade.attention_with_lse`. A second call within the same call of a module is handed out under its name and ":1",
    and so on. A module that multiplies the result of a softmax is noted as one that cannot be recorded. Layers of torch
    and of this library have taps of their own.
    """
    heard = [(module, name, _hear_products) for module, name in names_of(model).items() if not _is_known(module)]
    with listening(heard, valve):
        observer = functools.partial(_hear_attention, valve)
        OBSERVERS.append(observer)
        try:
            yield
        finally:
            OBSERVERS.remove(observer)


def without_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function run as if no tap listened: torch's layers leave their fast path where a mode is on."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        stack = reversed(torch.overrides._get_current_function_mode_stack())
        # Only what is on top can be taken off. Below another's mode ours changes nothing more.
        listening = list(itertools.takewhile(lambda mode: isinstance(mode, _Mode), stack))
        for mode in listening:
            mode.__exit__(None, None, None)
        try:
            return function(*args, **kwargs)
        finally:
            for mode in reversed(listening):
                mode.__enter__()

    return run


@dataclass
class _Speaker:
    """A module that runs, and a recording of it.

    Attributes:
        ear: the recording, and the module's name in it.
        kind: the name of the module's class.
        calls: how many calls of attention functions there were.
    """

    ear: Ear
    kind: str
    calls: int = 0


_running = Running()
_softmax_products = SoftmaxProducts()


class _Mode(TorchFunctionMode):
    """Looks at every call of a torch function while a recorded module runs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            given = dict(zip(_NAMES, args, strict=False)) | kwargs
            hand_out([(ear, lambda: _matrix(given)) for ear in _ears()])
        elif func is F.multi_head_attention_forward:
            hand_out([(ear, lambda: function_matrix(args, kwargs)) for ear in _ears()])
        elif _softmax_products.is_one(func, args, kwargs, out) and not _is_ours(sys._getframe(1)):
            for one in _innermost():
                one.ear.valve.note_unheard(one.ear.name, one.kind)
        return out


_MODE = _Mode()


@contextmanager
def hearing_products(module: nn.Module, ears: Iterable[Ear]) -> Iterator[None]:
    """Hand out the calls of torch's attention functions within the block as calls of a module."""
    is_on = _MODE in torch.overrides._get_current_function_mode_stack()
    kind = type(module).__name__
    with _running.within(*(_Speaker(ear, kind) for ear in ears)), nullcontext() if is_on else _MODE:
        yield


def _hear_attention(valve: Valve, inputs: AttentionInputs, impl: Impl) -> None:
    """Hand out a call of `saccade.attention` that a module made; calls that the library makes are part of a layer."""
    if not _called_by_library(sys._getframe(1)):
        hand_out([(ear, lambda: matrix_from_inputs(inputs, impl)) for ear in _ears(valve)])


def _called_by_library(frame: FrameType | None) -> bool:
    """Return whether the caller of `saccade.attention` is a module of this library."""
    inside = ("saccade.matrix.functions", "saccade.support.argument_hints", __name__)
    while frame is not None and frame.f_globals.get("__name__") in inside:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith("saccade.")


def _hear_products(call: HeardCall) -> Any:
    with hearing_products(call.module, call.ears):
        return call.run()


def _is_ours(frame: FrameType | None) -> bool:
    """Whether a kernel of saccade runs, of which the matrix is known."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("saccade.engine."):
            return True
        frame = frame.f_back
    return False


def _innermost() -> list[_Speaker]:
    """For each recording, the innermost module that runs."""
    return list({one.ear.valve: one for one in _running.stack}.values())


def _ears(only: Valve | None = None) -> list[Ear]:
    """Return the innermost module that runs, under its name for this call, for each recording or one of them."""
    ears = []
    for one in _innermost():
        name, valve = one.ear
        if only in (None, valve):
            ears.append(Ear(f"{name}:{one.calls}" if one.calls else name, valve))
            one.calls += 1
    return ears


def _matrix(given: dict[str, Any]) -> AttentionMatrix:
    """The matrix of a fused product; leading dimensions become batch items."""
    query, key = given["query"], given["key"]
    if is_nested(query, key):
        return _nested_matrix(query, key, given)
    shape = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3])
    heads = query.shape[-3] if query.dim() > 2 else 1
    query, key = (_four(x, shape) for x in (query, key))
    q_len, kv_len = query.shape[2], key.shape[2]
    mask = given.get("attn_mask")
    is_causal_object = is_causal_bias(mask)
    if given.get("is_causal") or (is_causal_object and starts_at_first_key(mask)):
        # torch's flag lets query 0 see key 0 and no more, whatever the lengths.
        rows, columns = range(q_len), range(kv_len)
        return AttentionMatrix(query, key, Causal(), scale=given.get("scale"), q_positions=rows, kv_positions=columns)
    if mask is None or is_causal_object:
        return AttentionMatrix(query, key, None if mask is None else Causal(), scale=given.get("scale"))
    mask = mask.expand(torch.broadcast_shapes(mask.shape, (q_len, kv_len))) if mask.dim() < 2 else mask
    if mask.dim() > 4 or (mask.dim() == 4 and len(shape) != 1):
        mask = mask.expand(*shape, heads, *mask.shape[-2:]).reshape(-1, heads, *mask.shape[-2:])
    mask = mask[(None,) * (4 - mask.dim())]
    rule, bias = rule_of_tensor(mask, kv_len)
    return AttentionMatrix(query, key, rule, bias=bias, scale=given.get("scale"))


def _nested_matrix(query: Tensor, key: Tensor, given: dict[str, Any]) -> AttentionMatrix:
    """Return the matrix of a fused product of nested tensors, packed; torch takes no mask beside them."""
    items, is_causal = Nested.of(query, key, key, axis=1), bool(given.get("is_causal"))
    if is_causal and items.q_lengths != items.kv_lengths:
        reason = "is_causal=True with nested queries and keys of different lengths depends on torch's kernel"
        raise unsupported(
            "scaled_dot_product_attention",
            [reason],
            hint="dense tensors, or saccade.attention(..., masks.Causal())",
        )
    rule = items.mask(Causal() if is_causal else None, items.query.shape[1])
    places: dict[str, Any] = {**items.positions}
    return AttentionMatrix(items.query, items.key, rule, scale=given.get("scale"), **places)


def _four(x: Tensor, shape: torch.Size) -> Tensor:
    """``[..., heads, len, head_dim]`` with the leading dimensions as one."""
    x = x if x.dim() > 2 else x[None]
    return x.expand(*shape, *x.shape[-3:]).reshape(-1, *x.shape[-3:])


def _is_known(module: nn.Module) -> bool:
    return (
        type(module).__module__.startswith(("torch.", "saccade."))
        or isinstance(module, torch.jit.ScriptModule)
        or inspect.isbuiltin(module.forward)
        or (speaks_attention_interface(module) and not _may_attend_itself(module))
    )


def _may_attend_itself(module: nn.Module) -> bool:
    """Whether a class names a softmax or a function of torch's, although its file has the attention interface."""
    own = itertools.takewhile(lambda base: base is not nn.Module, type(module).__mro__)
    functions = (inspect.unwrap(one) for base in own for one in vars(base).values() if inspect.isfunction(one))
    has_softmax = any(isinstance(part, nn.Softmax) for part in module.children())
    return has_softmax or any(not _NAMED.isdisjoint(one.__code__.co_names) for one in functions)
