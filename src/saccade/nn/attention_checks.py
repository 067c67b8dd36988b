"""Validate the sizes and inputs of attention layers."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor, nn

from saccade.caches import CrossCache, LayerCache
from saccade.engine import dropout
from saccade.engine.nested import check_dense, check_nested
from saccade.masks import Documents, Mask
from saccade.masks.causality import sees_later
from saccade.matrix import DENSE_LIMIT
from saccade.positions import Bias, Rotary
from saccade.positions.token_positions import GivenPositions, Positions, can_be_read
from saccade.support.errors import describe, value_error
from saccade.support.torch_modes import is_transformed
from saccade.support.validation import check_int, check_type


def check_sizes(
    embed_dim: int, num_heads: int, num_kv_heads: int, context_dim: int, head_dim: int | None, dropout_p: float
) -> int:
    """Raise an error unless an attention layer's widths and head counts are compatible. Return the width of a head."""
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "context_dim": context_dim}
    for name, size in sizes.items():
        check_int(name, size)
    if head_dim is None and embed_dim % num_heads:
        hint = "head_dim= sets the width of a head independently"
        raise value_error("num_heads", f"divide embed_dim {embed_dim}", num_heads, hint=hint)
    if num_heads % num_kv_heads:
        raise value_error("num_kv_heads", f"divide num_heads {num_heads}", num_kv_heads)
    dropout.check(dropout_p)
    return embed_dim // num_heads if head_dim is None else check_int("head_dim", head_dim)


def check_rotary(rotary: Rotary | None, head_dim: int) -> None:
    """Raise an error unless ``rotary`` is None or a Rotary that matches the attention layer's ``head_dim``."""
    if rotary is None:
        return
    hint = f"for instance saccade.positions.Rotary({head_dim})"
    check_type("rotary", rotary, Rotary, "be a saccade Rotary or None", hint=hint)
    if rotary.head_dim != head_dim:
        raise value_error("rotary", f"be made for head_dim {head_dim}", rotary.head_dim)


def check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    context_dim: int,
    dtype: torch.dtype | None,
) -> None:
    """Raise an error unless query, key and value have the attention layer's widths and dtype; None allows any dtype."""
    tensors = {"query": (query, embed_dim)}
    if key is not query or value is not query or context_dim != embed_dim:
        tensors |= {"key": (key, context_dim), "value": (value, context_dim)}
    for name, (x, width) in tensors.items():
        if not isinstance(x, Tensor):
            check_type(name, x, Tensor, "be a tensor")
        if x.is_nested:
            check_dense(**{name: x})
        if x.dim() != 3 or x.shape[2] != width:
            _misfit(tensors, name, f"have shape [batch, len, {width}]", list(x.shape))
        if dtype is not None and x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
            rule = f"be {str(dtype).removeprefix('torch.')}, like the parameters"
            _misfit(tensors, "dtype", rule, str(x.dtype).removeprefix("torch."))
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        got = f"{query.shape[0]}, {key.shape[0]} and {value.shape[0]}"
        _misfit(tensors, "batch", "be the same for all inputs", got)
    if key.shape[1] != value.shape[1]:
        _misfit(tensors, "key and value", "be equally long", f"{key.shape[1]} and {value.shape[1]}")


def _misfit(tensors: dict[str, tuple[Tensor, int]], argument: str, rule: str, got: object) -> NoReturn:
    facts = [describe(name, x) for name, (x, _) in tensors.items() if isinstance(x, Tensor)]
    raise value_error(argument, rule, got, facts=facts)


def checked_rotary_positions(
    rotary_positions: GivenPositions, rotary: nn.Module | None, is_self: bool, cache: LayerCache | None
) -> range | Tensor | None:
    """Check positions for the rotation only and return them, or None if there are none.

    Raise an error if the attention layer or its cache cannot use such positions.
    """
    if rotary_positions is None:
        return None
    if rotary is None:
        raise value_error("rotary_positions", "be None in a layer without rotary", "positions")
    if not is_self:
        hint = "positions= and kv_positions= rotate the queries and keys of cross-attention"
        raise value_error("rotary_positions", "be None in cross-attention", "positions", hint=hint)
    if getattr(cache, "rotary", None) is not None:
        raise value_error("rotary_positions", f"be None with a {type(cache).__name__} that rotates keys", "positions")
    return Positions.of(rotary_positions, "rotary_positions").given


def check_convolved(is_self: bool, cache: LayerCache | None) -> None:
    """Raise an error unless a call of a layer with a short convolution is self-attention."""
    if not is_self or isinstance(cache, CrossCache):
        hint = "short_convolution=None for cross-attention"
        raise value_error("key", "be None in a layer with a short convolution", "another tensor", hint=hint)


def check_nested_call(
    mask: object,
    bias: object,
    positions: object,
    kv_positions: object,
    rotary_positions: object,
    cache: object,
) -> None:
    """Raise an error unless an attention call supports nested tensors.

    Its mask and bias must be functions of positions, and it must have no positions and no cache.
    """
    places = {"positions": positions, "kv_positions": kv_positions, "rotary_positions": rotary_positions}
    check_nested(mask, bias, None, **places, cache=cache)


def check_with_cache(
    cache: LayerCache,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    mask: object,
    kv_positions: object,
    context_dim: int,
    *,
    positions_unknown: bool,
) -> None:
    """Raise an error unless a call with a cache passes the inputs that the cache still needs, and no others."""
    if not isinstance(cache, LayerCache):
        hint = "for instance saccade.caches.KVCache(); a Cache of a whole model contains one for each layer"
        check_type("cache", cache, LayerCache, "be the cache of a layer, or None", hint=hint)
    if isinstance(mask, Tensor):
        hint = "masks.Dense(tensor) reads a tensor by position; mark padding with position -1"
        raise value_error("mask", "be a rule on positions with a cache", "a tensor", hint=hint)
    if not isinstance(cache, CrossCache):
        if not (key is None and value is None and kv_positions is None):
            name = "kv_positions" if key is None and value is None else "key and value"
            hint = "the cache contains the keys of earlier tokens; another context needs a saccade.caches.CrossCache"
            raise value_error(name, f"be None with a {type(cache).__name__}", "tensors", hint=hint)
        return
    if positions_unknown:
        hint = "a CrossCache does not count queries"
        raise value_error("positions", "be given with rotary and a CrossCache", None, hint=hint)
    if not cache.is_filled:
        if key is None:
            raise value_error("key", "be given in the first call with a CrossCache", None)
    else:
        if key is not None:  # recomputation would reuse the first run's keys, which have no gradient
            cache.check_not_replayed()
        shape = [len(query), cache.length, context_dim]
        for name, x in (("key", key), ("value", value)):
            if x is not None and list(x.shape) != shape:
                rule = f"have shape {shape}, as the context in the cache, or be None"
                raise value_error(name, rule, list(x.shape), hint="make a new CrossCache for a new context")
        if kv_positions is not None:
            raise value_error("kv_positions", "be given only in the first call with a CrossCache", "new positions")


def check_stored_size(shape: tuple[int, int, int, int]) -> None:
    """Raise an error if a matrix of this shape has too many weights to be stored."""
    size = math.prod(shape)
    if size > DENSE_LIMIT:
        rule, got = f"be at most {DENSE_LIMIT:,} weights", f"{size:,} weights, {list(shape)}"
        hint = "matrix(...) returns them as a lazy matrix: rows, products, A.mT @ x"
        raise value_error("size", rule, got, hint=hint)


def check_document_positions(mask: Mask, positions: Positions) -> None:
    """Raise an error if positions restart in each document although the mask identifies documents by position."""
    table = positions.table
    if table is None or not can_be_read(table) or is_transformed() or not _has_documents(mask):
        return
    ordered = torch.atleast_2d(table).sort(-1).values
    repeated = ordered[:, 1:][(ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)]
    if len(repeated):
        hint = "omit positions: patterns and position tables restart with each text of Documents"
        rule = "be distinct within each whole row when Documents separate texts"
        raise value_error("positions of keys", rule, f"{int(repeated[0])} twice", hint=hint)


def _has_documents(mask: Mask) -> bool:
    if isinstance(mask, Documents):
        return any(len(item) > 1 for item in mask.lengths)
    return any(map(_has_documents, mask.made_of))


def checked_bias(bias: object) -> Bias:
    """Return the bias, or raise an error if it is not a function of positions.

    A tensor cannot be the bias of all calls with a cache, because its shape fits only one call.
    """
    hint = "for instance positions.ALiBi(num_heads), or your own saccade.positions.Bias"
    return check_type("bias", bias, Bias, "be a rule on positions with a cache", hint=hint)


def check_causal(mask: Mask | None, positions: range | Tensor | None, cache: LayerCache) -> Positions | None:
    """Return the positions of new tokens. Raise an error if the attention mask lets tokens attend to later keys.

    With such a mask, decoding with a cache would give a different output from one pass over the full sequence.
    """
    if positions is None:
        return None
    if (mask is not None and mask.is_causal) or not sees_later(mask, positions):
        return Positions(positions) if isinstance(positions, range) else Positions(None, positions)
    hint = (
        "mask=masks.Causal(), or your_mask & masks.Causal(); pass keys together "
        "with the queries that may attend to them"
    )
    rule = f"hide later keys from every query with a {type(cache).__name__}"
    raise value_error("mask", rule, mask, hint=hint)
