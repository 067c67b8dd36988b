"""Functions for stacks in which layers share keys, values or selected keys: checks, arguments of a call, and caches."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from saccade.caches import Cache, LayerCache
from saccade.mechanisms import Forgetting
from saccade.nn.attention import MultiHeadAttention
from saccade.nn.base_layer import AttentionLayer
from saccade.nn.latent_attention import LatentAttention
from saccade.nn.shared_keys import MixedValues, SharedKeyAttention, SharedKeys
from saccade.nn.shared_selection import SharedSelection
from saccade.support.errors import value_error


def check_sources(layers: nn.ModuleList) -> None:
    """Raise an error unless each layer that reads keys or a selection can read those of an earlier layer."""
    attentions = _attentions(layers)
    for index, reader in enumerate(attentions):
        if reader.source is None:
            continue
        if reader.source >= index:
            raise value_error(f"source of layer {index}", "be an earlier layer", reader.source)
        source, name = attentions[reader.source], f"attention of layer {reader.source}, a source,"
        if isinstance(reader, SharedKeyAttention):
            _check_keys(source, reader, name, index)
        elif not isinstance(source, LatentAttention) or source.indexer is None:
            rule, hint = "be a LatentAttention with an indexer", "selection_from=, the index of the layer that selects"
            got = type(source).__name__ + " without one" * isinstance(source, LatentAttention)
            raise value_error(name, rule, got, hint=hint)
        if layers[index].cross_attention is not None:
            rule = "have no cross_attention, since it reads keys or a selection of another layer"
            raise value_error(f"layer {index}", rule, "one")


def _attentions(layers: nn.ModuleList) -> list[AttentionLayer]:
    attentions: list[Any] = [layer.attention for layer in layers]
    return attentions


def _check_keys(source: AttentionLayer, reader: SharedKeyAttention, name: str, index: int) -> None:
    """Raise an error unless a layer can read the keys and values of another, which ``name`` describes."""
    if not isinstance(source, MultiHeadAttention) or source.convolution is not None:
        rule = "be a MultiHeadAttention without a short convolution"
        raise value_error(name, rule, type(source).__name__)
    sizes = [source.num_kv_heads, source.head_dim]
    if sizes != [reader.num_kv_heads, reader.head_dim]:
        raise value_error(name, f"have {reader.num_kv_heads} key heads of width {reader.head_dim}", sizes)
    if isinstance(source.mechanism, Forgetting) and not isinstance(reader.mechanism, Forgetting):
        rule = f"be a Forgetting, because the keys of layer {reader.source} contain forget gates"
        raise value_error(f"mechanism of layer {index}", rule, type(reader.mechanism).__name__)


def shared_options(layers: nn.ModuleList, mixes: Tensor | None) -> list[dict[str, SharedKeys | SharedSelection]]:
    """Return keyword arguments, one dictionary per layer, with which layers share keys or a selection in one call.

    Args:
        layers: the layers of a stack.
        mixes: the weights of the first layer's values in each later layer, and of that layer's own, ``[layers - 1,
            2]``; None without a value residual.
    """
    if mixes is not None:
        first = SharedKeys()
        return [{"shared": one} for one in (first, *(MixedValues(first, weights) for weights in mixes))]
    shared: dict[int, SharedKeys | SharedSelection] = {}
    attentions = _attentions(layers)
    for reader in attentions:
        if reader.source is not None and reader.source not in shared:
            shared[reader.source] = SharedKeys() if isinstance(reader, SharedKeyAttention) else SharedSelection()
    if not shared:
        return [{} for _ in attentions]
    sources = (index if own.source is None else own.source for index, own in enumerate(attentions))
    return [{"shared": shared[source]} if source in shared else {} for source in sources]


def caches_per_layer(layers: nn.ModuleList, cache: Cache) -> list[LayerCache | Cache]:
    """Return one cache per layer. A layer that reads the keys of an earlier layer gets that layer's cache."""
    stored = iter(cache)
    caches: list[LayerCache | Cache] = []
    for own in _attentions(layers):
        if isinstance(own, SharedKeyAttention) and own.source is not None:
            caches.append(caches[own.source])
        else:
            caches.append(next(stored))
    return caches
