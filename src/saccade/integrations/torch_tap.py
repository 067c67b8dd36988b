"""The tap of torch's own layers: what ``nn.MultiheadAttention`` is called with, projected once more."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from saccade.attention import AttentionMatrix
from saccade.integrations.listening import HeardCall, Kind, Running, listening
from saccade.integrations.sdpa_tap import without_mode
from saccade.integrations.torch_calls import projected, rule_of
from saccade.integrations.valve import Valve, closed, hand_out, names_of

__all__ = ["tapped_torch_layers"]

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
        return _matrix(module, given["query"], given["key"], batch_first, **masks)

    hand_out([(ear, make) for ear in call.ears])
    return out


def _note_attention(call: HeardCall) -> Any:
    """Run an attention whose class has its own forward: no fast path runs it, and it may compute otherwise."""
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
        return _matrix(module.self_attn, x, x, True, norm=norm, **masks)

    hand_out([(ear, make) for ear in call.ears])
    return out


def _matrix(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    batch_first: bool,
    *,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    norm: nn.Module | None = None,
) -> AttentionMatrix:
    """The matrix of one call, from what the layer was given."""
    is_token = None
    if query.is_nested:
        is_self = key is query
        query, is_token = _padded(query)
        key, key_padding_mask = (query, ~is_token) if is_self else _padded(key)
        key_padding_mask = ~is_token if is_self else ~key_padding_mask
    is_self = key is query
    query, key = (x if x.dim() == 3 else x[None] for x in (query, key))
    if not batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    if norm is not None:
        query = norm(query)
        key = query if is_self else norm(key)
    q, k, _ = projected(module, query, key)
    batch, heads, kv_len, _ = k.shape
    rule, bias = rule_of(attn_mask, key_padding_mask, (batch, heads, q.shape[2], kv_len))
    places: dict[str, Any] = {}
    if is_token is not None:  # rows that no token asks do not exist
        position = torch.arange(kv_len, device=k.device).expand(batch, -1)
        places = {"q_positions": torch.where(is_token, position, -1), "kv_positions": range(kv_len)}
    return AttentionMatrix(q, k, rule, bias=bias, **places)


def _padded(x: Tensor) -> tuple[Tensor, Tensor]:
    """A nested tensor as ``[batch, longest, width]``, and which of it are tokens."""
    lengths = torch.tensor([len(item) for item in x.unbind()], device=x.device)
    padded = x.to_padded_tensor(0.0)
    return padded, torch.arange(padded.shape[1], device=x.device) < lengths[:, None]
