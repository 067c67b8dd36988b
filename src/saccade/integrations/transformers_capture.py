"""Capture transformers models by wrapping the functions that layers get from the attention interface."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from saccade.integrations.call_output import CallOutput
from saccade.integrations.capture_context import (
    Capture,
    Listener,
    Make,
    emit_all,
    names_of,
    suppressed,
)
from saccade.integrations.capture_mode import capture_code_of, without_mode
from saccade.integrations.forward_proxy import PATCH_LOCK
from saccade.integrations.lazy_mask import LazyMask, Placed
from saccade.integrations.mask_functions import placed_rule
from saccade.integrations.matrix_hooks import Product, collected_products
from saccade.integrations.tensor_masks import mask_of_tensor
from saccade.integrations.transformers_call import AttentionCall
from saccade.matrix import AttentionMatrix, Matrix
from saccade.support.errors import unsupported
from saccade.support.torch_modes import is_tracing

CALLED_AS = "record"  # the name in error messages

_REMEMBERED = 8
_SMALL = 1 << 20
_STANDARD = ("eager", "sdpa", "flex_attention")  # like "flash" functions, these apply exactly the mask they receive
_model_captures: tuple[_ModelCapture, ...] = ()  # replaced, never mutated: other threads may iterate over it
_restore: list[Callable[[], None]] = []


@contextmanager
def capture_interface(model: nn.Module, capture: Capture) -> Iterator[None]:
    """Capture each attention call that a module of ``model`` makes through transformers' attention interface.

    Configuration, masks and kernels stay unchanged, for any implementation. The mask rule is derived from the function
    that built the mask tensor, not from the tensor. Nothing is captured unless a transformers model has been imported.
    """
    if sys.modules.get("transformers.modeling_utils") is None:
        yield
        return
    global _model_captures  # noqa: PLW0603  since there is one interface
    model_capture = _ModelCapture(names_of(model), capture)
    with PATCH_LOCK:
        if not _model_captures:
            _restore.append(_patch_interfaces())
        _model_captures = (*_model_captures, model_capture)
    try:
        yield
    finally:
        with PATCH_LOCK:
            _model_captures = tuple(other for other in _model_captures if other is not model_capture)
            if not _model_captures:
                _restore.pop()()


class _ModelCapture:
    def __init__(self, names: dict[nn.Module, str], capture: Capture):
        self.names, self.capture = names, capture
        self._known: dict[int, _Known] = {}
        self._latest: tuple[Placed, ...] = ()  # replaced, never mutated: several threads may build masks

    def remember(self, mask: Any, placed: Placed) -> None:
        """Store a mask tensor's rule while the tensor exists, and keep the latest rules to recognise copied masks."""
        key = id(mask)
        self._latest = (placed, *self._latest[: _REMEMBERED - 1])
        self._known[key] = _Known(
            weakref.ref(mask, lambda _: self._known.pop(key, None)), placed, _version_counter(mask)
        )

    def rule_or_tensor(self, mask: Any, batch: int, device: torch.device) -> Any:
        """Return the rule from which a mask tensor was built, as a lazy mask, or the tensor if the rule is unknown.

        The rule is not used for a mask that was modified in place. `generate` copies masks for a static cache: small
        copies are recognised by their contents, and so are masks without a version counter.
        """
        known = self._known.get(id(mask))
        if known is not None and known.mask() is mask:
            lazy = LazyMask(known.placed, batch, device)
            if known.version == _version_counter(mask) and (known.version is not None or _is_equal_mask(lazy, mask)):
                return lazy
        elif type(mask) is Tensor and mask.dim() == 4 and mask.numel() <= _SMALL:
            for placed in self._latest:
                lazy = LazyMask(placed, mask.shape[0], mask.device)
                if _is_equal_mask(lazy, mask):
                    return lazy
        return mask


class _Known(NamedTuple):
    mask: weakref.ref[Any]
    placed: Placed
    version: int | None


def _version_counter(mask: Any) -> int | None:
    """Return a mask tensor's version counter, or None for an inference tensor, which has none."""
    if not isinstance(mask, Tensor):
        return 0
    return None if mask.is_inference() else mask._version


def _is_equal_mask(lazy: LazyMask, mask: Any) -> bool:
    """Return whether a mask tensor masks the same pairs as a lazy mask, comparing a few rows at a time."""
    placed, q_len = lazy.placed, mask.shape[2]
    if (len(placed.q_positions), len(placed.kv_positions)) != mask.shape[2:]:
        return False
    rows = max(1, _SMALL // max(1, mask.shape[0] * mask.shape[3]))
    for first in range(0, q_len, rows):
        part = LazyMask(placed._replace(q_positions=placed.q_positions[first : first + rows]), len(mask), mask.device)
        expected = part.written_out()
        allowed, added = mask_of_tensor(mask[:, :, first : first + rows])
        if added is not None or not (expected.all() if allowed is None else torch.equal(expected, allowed)):
            return False
    return True


def _patch_interfaces() -> Callable[[], None]:
    """Wrap transformers' attention and mask interfaces, and return a function that removes the wrappers."""
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415  imported by the model

    get_interface, get_mask = AttentionInterface.get_interface, AttentionMaskInterface.__getitem__
    inherited = "__getitem__" not in vars(AttentionMaskInterface)

    def get_interface_captured(self: Any, attn_implementation: Any, default: Any) -> Callable[..., Any]:
        name, function = str(attn_implementation), get_interface(self, attn_implementation, default)
        return _capturing(function, is_flash="flash" in name, is_foreign=_is_foreign(name, function))

    def get_mask_captured(self: Any, name: str) -> Callable[..., Any]:
        return _capturing_mask(get_mask(self, name))

    # The classes are patched instead of their mappings, so the implementation names of models do not change.
    setattr(AttentionInterface, "get_interface", get_interface_captured)  # noqa: B010
    setattr(AttentionMaskInterface, "__getitem__", get_mask_captured)  # noqa: B010

    def restore() -> None:
        # If other code has since wrapped this wrapper, it stays in place; without captures it does nothing.
        if AttentionInterface.get_interface is get_interface_captured:
            setattr(AttentionInterface, "get_interface", get_interface)  # noqa: B010
        if AttentionMaskInterface.__getitem__ is not get_mask_captured:
            return
        if inherited:
            delattr(AttentionMaskInterface, "__getitem__")
        else:
            setattr(AttentionMaskInterface, "__getitem__", get_mask)  # noqa: B010

    return restore


def _is_foreign(name: str, function: Callable[..., Any]) -> bool:
    """Return whether an attention function is third-party, and may therefore apply a mask or bias of its own."""
    home = str(getattr(function, "__module__", None) or type(function).__module__)
    return not (name in _STANDARD or "flash" in name or home.startswith(("transformers.", "saccade.")))


def _capturing(function: Callable[..., Any], *, is_flash: bool, is_foreign: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def capturing(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        model_captures = [one for one in _model_captures if module in one.names]
        if not model_captures:
            return function(module, query, key, value, attention_mask, *args, **kwargs)
        listeners = [Listener(one.names[module], one.capture) for one in model_captures]
        before = [listener.capture.num_captured for listener in listeners]
        with (
            capture_code_of(module, listeners) if is_foreign else suppressed(listeners),
            collected_products() as products,
        ):
            run = function if is_foreign else without_mode(function)
            out = run(module, query, key, value, attention_mask, *args, **kwargs)
        if products:  # saccade's functions report their own matrices
            _emit_products(listeners, products)
            return out
        if [listener.capture.num_captured for listener in listeners] != before:  # a third-party function called SDPA
            return out
        if args:
            reason = f"{type(module).__name__} passes {len(args)} additional positional arguments"
            raise unsupported("a transformers model", [reason])
        options = {name: option for name, option in kwargs.items() if name not in ("dropout", "output_attentions")}
        if getattr(key, "saccade_cache", None) is not None:
            reason = "it uses a saccade cache, which returns only the new keys"
            raise unsupported("a transformers model", [reason], hint="use transformers' own caches")

        def making(model_capture: _ModelCapture) -> Make:
            def make() -> AttentionMatrix:
                mask = model_capture.rule_or_tensor(attention_mask, len(key), key.device)
                return AttentionCall.of(module, query, key, mask, options, is_flash=is_flash).matrix()

            return make

        if is_foreign and not _is_product(making(model_captures[0]), value, out, kwargs.get("dropout")):
            for listener in listeners:
                listener.capture.note_not_recorded(listener.name, type(module).__name__)
            return out
        output = _output(out, value, kwargs.get("dropout"))
        emit_all([(listener, making(one)) for one, listener in zip(model_captures, listeners, strict=True)], output)
        return out

    return capturing


def _is_product(make: Make, value: Tensor, out: Any, dropout_p: float | None) -> bool:
    """Return whether an attention function's output is the matrix times the values; always False with dropout."""
    if dropout_p or not (isinstance(out, tuple) and isinstance(out[0], Tensor)):
        return False
    with torch.no_grad():
        expected = make().matmul(value.detach()).transpose(1, 2)
    tolerance = max(1e-4, 16 * torch.finfo(expected.dtype).eps)
    is_alike = out[0].shape == expected.shape
    return is_alike and torch.allclose(out[0].to(expected.dtype), expected, rtol=tolerance, atol=tolerance)


def _output(out: Any, value: Tensor, dropout_p: float | None) -> CallOutput | None:
    """Wrap an attention function's output ``[batch, q_len, heads, value_dim]``; return None for any other result."""
    if not (isinstance(out, tuple) and isinstance(out[0], Tensor) and out[0].dim() == 4):
        return None
    return CallOutput(out[0], lambda grad: grad.transpose(1, 2), lambda: value, float(dropout_p or 0.0))


def _emit_products(listeners: list[Listener], products: list[Product]) -> None:
    """Emit the attention products of one call; append ":1" to the layer's name for the second product, and so on."""

    def making(matrix: Matrix) -> Make:
        return lambda: matrix

    for number, (matrix, output) in enumerate(products):
        named = [listener._replace(name=f"{listener.name}:{number}") if number else listener for listener in listeners]
        emit_all([(listener, making(matrix)) for listener in named], output)


def _capturing_mask(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def capturing(*args: Any, **kwargs: Any) -> Any:
        mask = without_mode(function)(*args, **kwargs)
        is_known = (type(mask) is Tensor and mask.dim() == 4) or isinstance(mask, BlockMask)
        if is_known and not args and not is_tracing():
            names = ("q_length", "kv_length", "q_offset", "kv_offset")
            sizes = {name: kwargs[name] for name in names if name in kwargs}
            placed = placed_rule(
                kwargs["mask_function"], kwargs.get("attention_mask"), one_by_one=kwargs.get("use_vmap", False), **sizes
            )
            for model_capture in _model_captures:
                model_capture.remember(mask, placed)
        return mask

    return capturing
