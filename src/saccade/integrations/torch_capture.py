"""Capture torch's own layers by projecting the inputs of ``nn.MultiheadAttention`` a second time."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from saccade.integrations.capture_context import Capture, emit_all, names_of, suppressed
from saccade.integrations.capture_mode import without_mode
from saccade.integrations.forward_proxy import CapturedCall, Handler, Running, capture_forwards
from saccade.integrations.mha_matrix import layer_matrix, layer_output
from saccade.matrix import AttentionMatrix

CALLED_AS = "record"  # the name in error messages

_ATTENTION = inspect.signature(nn.MultiheadAttention.forward)
_LAYER = inspect.signature(nn.TransformerEncoderLayer.forward)
# Modules that may take torch's fast path, which does not run in Python.
_FAST_PATH = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, nn.TransformerDecoderLayer)


def capture_torch_layers(model: nn.Module, capture: Capture) -> AbstractContextManager[None]:
    """Capture each call to an ``nn.MultiheadAttention``, even if an encoder layer's fast path bypasses it.

    The layers run unchanged in training and evaluation, on the fast path and with nested tensors. To build the matrix,
    queries and keys are projected a second time, because the fast path does not return them.
    """
    return capture_forwards(_captured_modules(names_of(model)), capture)


def _captured_modules(names: dict[nn.Module, str]) -> Iterator[tuple[nn.Module, str, Handler]]:
    """Yield torch's attention and encoder modules, with their names and call handlers."""
    for module, name in names.items():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its class has no forward
        forward = type(module).forward
        if isinstance(module, nn.MultiheadAttention):
            yield module, name, _capture_attention if forward is nn.MultiheadAttention.forward else _note_attention
        elif isinstance(module, nn.TransformerEncoderLayer) and forward is nn.TransformerEncoderLayer.forward:
            yield module, names.get(module.self_attn, name), _capture_layer
            if not isinstance(module.self_attn, nn.MultiheadAttention):  # a replacement, which is captured separately
                yield module.self_attn, names.get(module.self_attn, name), _note_attention
        elif isinstance(module, _FAST_PATH):
            yield module, name, _run


@dataclass
class _Layer:
    """A running encoder layer of torch, with its attention module and whether that module has been called."""

    attention: nn.Module
    was_called: bool = False


_running = Running()


def _run(call: CapturedCall) -> Any:
    return without_mode(call.forward)(*call.args, **call.kwargs)


def _capture_attention(call: CapturedCall) -> Any:
    module = call.module
    assert isinstance(module, nn.MultiheadAttention)
    _note(module)
    with suppressed(call.listeners):
        out = _run(call)
    arguments = _ATTENTION.bind(module, *call.args, **call.kwargs).arguments
    masks = {key: arguments.get(key) for key in ("attn_mask", "key_padding_mask")}
    batch_first = module.batch_first or arguments["query"].dim() == 2

    def make() -> AttentionMatrix:
        return layer_matrix(module, arguments["query"], arguments["key"], batch_first, **masks)

    inputs = tuple(arguments[name] for name in ("query", "key", "value"))
    dropout_p = module.dropout if module.training else 0.0
    output = layer_output(module, inputs, out[0], batch_first, dropout_p)
    emit_all([(listener, make) for listener in call.listeners], output)
    return out


def _note_attention(call: CapturedCall) -> Any:
    """Run an attention module with an overridden ``forward``, and note that the encoder layer called it.

    The encoder layer's attention is then not captured. Only the fast path computes torch's own attention: it reads the
    module's weights without calling the module.
    """
    _note(call.module)
    return call.run()


def _note(attention: nn.Module) -> None:
    for layer in _running.stack[-1:]:
        layer.was_called = layer.was_called or layer.attention is attention


def _capture_layer(call: CapturedCall) -> Any:
    module = call.module
    assert isinstance(module, nn.TransformerEncoderLayer)
    layer = _Layer(module.self_attn)
    with _running.within(layer):
        out = _run(call)
    if layer.was_called:
        return out
    arguments = _LAYER.bind(module, *call.args, **call.kwargs).arguments
    masks = {"attn_mask": arguments.get("src_mask"), "key_padding_mask": arguments.get("src_key_padding_mask")}

    def make() -> AttentionMatrix:
        x = arguments["src"]
        norm = module.norm1 if module.norm_first else None
        return layer_matrix(module.self_attn, x, x, True, norm=norm, **masks)

    emit_all([(listener, make) for listener in call.listeners])
    return out
