"""The tap of torch's own layers: what ``nn.MultiheadAttention`` is called with, projected once more."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

from saccade.integrations.capture_context import Valve, closed, hand_out, names_of
from saccade.integrations.forward_proxy import HeardCall, Kind, Running, listening
from saccade.integrations.layer_matrix import layer_matrix
from saccade.integrations.sdpa_capture import without_mode
from saccade.matrix import AttentionMatrix

CALLED_AS = "record"  # in errors

_ATTENTION = inspect.signature(nn.MultiheadAttention.forward)
_LAYER = inspect.signature(nn.TransformerEncoderLayer.forward)
# What may take torch's fast path, which leaves Python.
_WHOLE = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, nn.TransformerDecoderLayer)


def tapped_torch_layers(model: nn.Module, valve: Valve) -> AbstractContextManager[None]:
    """Hand out each call of an ``nn.MultiheadAttention``, also where an encoder layer's fast path never calls it.

    The layers run as they would: training, evaluation, fast path, nested tensors. Queries and keys are projected once
    more for the matrix, which a fast path does not hand out.
    """
    return listening(_heard(names_of(model)), valve)


def _heard(names: dict[nn.Module, str]) -> Iterator[tuple[nn.Module, str, Kind]]:
    """Torch's modules, their names, and how to listen to each; subclasses with a forward of their own are left out."""
    for module, name in names.items():
        conduct = type(module).forward
        if isinstance(module, nn.MultiheadAttention):
            yield module, name, _hear_attention if conduct is nn.MultiheadAttention.forward else _note_attention
        elif isinstance(module, nn.TransformerEncoderLayer) and conduct is nn.TransformerEncoderLayer.forward:
            yield module, names.get(module.self_attn, name), _hear_layer
            if not isinstance(module.self_attn, nn.MultiheadAttention):  # it stands in for one, and hands out its own
                yield module.self_attn, names.get(module.self_attn, name), _note_attention
        elif isinstance(module, _WHOLE):
            yield module, name, _run


@dataclass
class _Layer:
    """An encoder layer that runs: its attention, and whether that was called."""

    attention: nn.Module
    was_called: bool = False


_running = Running()


def _run(call: HeardCall) -> Any:
    return without_mode(call.forward)(*call.args, **call.kwargs)


def _hear_attention(call: HeardCall) -> Any:
    module = call.module
    assert isinstance(module, nn.MultiheadAttention)
    _note(module)
    with closed(call.ears):
        out = _run(call)
    given = _ATTENTION.bind(module, *call.args, **call.kwargs).arguments
    masks = {key: given.get(key) for key in ("attn_mask", "key_padding_mask")}
    batch_first = module.batch_first or given["query"].dim() == 2

    def make() -> AttentionMatrix:
        return layer_matrix(module, given["query"], given["key"], batch_first, **masks)

    hand_out([(ear, make) for ear in call.ears])
    return out


def _note_attention(call: HeardCall) -> Any:
    """Run an attention whose class has its own forward, and note that its layer called it.

    The layer then hands out nothing: only its fast path, which reads the weights and calls nothing, computes what
    torch's own attention would.
    """
    _note(call.module)
    return call.run()


def _note(attention: nn.Module) -> None:
    for layer in _running.stack[-1:]:
        layer.was_called = layer.was_called or layer.attention is attention


def _hear_layer(call: HeardCall) -> Any:
    module = call.module
    assert isinstance(module, nn.TransformerEncoderLayer)
    layer = _Layer(module.self_attn)
    with _running.within(layer):
        out = _run(call)
    if layer.was_called:
        return out
    given = _LAYER.bind(module, *call.args, **call.kwargs).arguments
    masks = {"attn_mask": given.get("src_mask"), "key_padding_mask": given.get("src_key_padding_mask")}

    def make() -> AttentionMatrix:
        x = given["src"]
        norm = module.norm1 if module.norm_first else None
        return layer_matrix(module.self_attn, x, x, True, norm=norm, **masks)

    hand_out([(ear, make) for ear in call.ears])
    return out
