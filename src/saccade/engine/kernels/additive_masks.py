"""Additive masks: a tile's bias with -inf for masked pairs, for operations that add one tensor to all scores."""

from __future__ import annotations

import math
from collections.abc import Hashable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.inputs import AttentionInputs
from saccade.engine.tiles.tile_scores import allowed
from saccade.plan import Tile
from saccade.support.torch_modes import unobserved

_MEMO_ENTRIES = 1 << 22  # number of entries of residual tensors that a plan may cache: 16 MB in float32


class Added(NamedTuple):
    """Additive mask or bias of a tile, and the rows where every key is masked; None for either if there is none."""

    terms: Tensor | None
    empty: Tensor | None

    @classmethod
    def of(cls, terms: Tensor) -> Added:
        """Return an additive mask together with the rows in which it masks every key."""
        empty = (terms == -math.inf).all(-1)
        return cls(terms, empty if bool(empty.any()) else None)


NOTHING = Added(None, None)


def added_terms(inputs: AttentionInputs, tile: Tile, is_masked: bool) -> Added:
    """Return the additive mask of a tile: the bias, and -inf for masked pairs, if any pair ``is_masked``."""
    hidden = _cached_hidden_terms(inputs, tile) if is_masked else NOTHING
    return hidden if inputs.bias is None or not tile.columns else with_bias(inputs, tile, hidden.terms)


def with_bias(inputs: AttentionInputs, piece: Tile, hidden: Tensor | None) -> Added:
    """Return the additive mask of a tile with a bias: the bias, with -inf for masked pairs."""
    assert inputs.bias is not None  # callers have checked
    bias = inputs.bias.read(piece)
    bias = bias if bias.dtype == torch.float32 else bias.to(inputs.query.dtype)  # the operation accepts only these
    bias = bias if bias.stride(3) in (0, 1) else bias.contiguous()  # the operation would copy it each time
    # Fill instead of adding, so that a NaN in the bias of a masked pair is also masked.
    terms = bias if hidden is None else bias.masked_fill(hidden == -math.inf, -math.inf)
    return Added.of(terms.expand(*terms.shape[:2], piece.height, piece.width))


def hidden_key(inputs: AttentionInputs, piece: Tile) -> Hashable:
    """Return a cache key for the additive mask of a tile. Tiles with equal keys mask the same pairs."""
    return (
        inputs.query.dtype,
        inputs.device,
        piece.height,
        *((piece.batch.start, piece.batch.stop) if inputs.rule.shape[0] > 1 else ()),
        *((piece.heads.start, piece.heads.stop) if inputs.rule.shape[1] > 1 else ()),
        *((len(strip.keys), strip.partial) for strip in piece.columns),
    )


def fits_into_cache(entries: int, held: int) -> bool:
    """Return whether an additive mask with ``entries`` entries may be cached in addition to ``held`` cached entries."""
    return entries + held <= _MEMO_ENTRIES


def _cached_hidden_terms(inputs: AttentionInputs, tile: Tile) -> Added:
    """Return the additive mask of a tile: 0, or -inf for masked pairs. It is cached if the mask cannot change."""
    key = hidden_key(inputs, tile)
    memo = inputs.plan.memo if inputs.rule.is_value else {}
    cached = memo.get(key)
    if isinstance(cached, Added):
        return cached
    with unobserved() if inputs.rule.is_value else nullcontext():
        added = hidden_terms(inputs, tile)
    held = sum(x.terms.numel() for x in list(memo.values()) if isinstance(x, Added) and x.terms is not None)
    if added.terms is not None and fits_into_cache(added.terms.numel(), held):
        memo[key] = added
    return added


def hidden_terms(inputs: AttentionInputs, piece: Tile) -> Added:
    """Compute the additive mask of a tile: 0 for allowed pairs, -inf for masked pairs. Nothing is cached."""
    visible = allowed(inputs, piece)
    assert visible is not None  # some column range is partial
    if inputs.rule.is_value:  # batch items and heads with the same mask share a cache entry
        items, heads = inputs.rule.shape
        visible = visible[: 1 if items == 1 else None, : 1 if heads == 1 else None]
    terms = torch.full(visible.shape, -math.inf, dtype=inputs.query.dtype, device=inputs.device)
    terms.masked_fill_(visible, 0.0)
    empty = ~visible.any(-1)
    return Added(terms, empty if bool(empty.any()) else None)
