"""What torch's flash operation is to add to the scores of a call: the bias, and -inf where a pair is hidden."""

from __future__ import annotations

import math
from collections.abc import Hashable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.inputs import Ingredients
from saccade.engine.kernels.fused_calls import Call
from saccade.engine.tiles.tile_scores import allowed
from saccade.plan import Tile
from saccade.support.torch_modes import unobserved

__all__ = ["NOTHING", "Added", "added", "hidden_key", "is_kept", "made", "with_bias"]

_MEMO_ENTRIES = 1 << 22  # entries of residual tensors that a plan may keep: 16 MB in float32


class Added(NamedTuple):
    """What the operation adds to the scores of a call, and the rows of it that this leaves without a key."""

    terms: Tensor | None
    empty: Tensor | None

    @classmethod
    def of(cls, terms: Tensor) -> Added:
        """Look for empty rows once, where the terms are made."""
        empty = (terms == -math.inf).all(-1)
        return cls(terms, empty if bool(empty.any()) else None)


NOTHING = Added(None, None)


def added(given: Ingredients, call: Call) -> Added:
    """Bias, and -inf at hidden pairs, for the rows and columns of a call."""
    hidden = NOTHING if call.causal or call.is_sure else _hidden(given, call)
    return hidden if given.bias is None or not call.tile.columns else with_bias(given, call.tile, hidden.terms)


def with_bias(given: Ingredients, piece: Tile, hidden: Tensor | None) -> Added:
    """The bias of a tile, and -inf where the other terms, if there are any, are -inf."""
    assert given.bias is not None  # who calls has looked
    bias = given.bias.read(piece)
    bias = bias if bias.dtype == torch.float32 else bias.to(given.query.dtype)  # the operation takes these two
    bias = bias if bias.stride(3) in (0, 1) else bias.contiguous()  # the operation would do it in each call
    # Filled, not added: a NaN in the bias at a hidden pair is hidden too.
    terms = bias if hidden is None else bias.masked_fill(hidden == -math.inf, -math.inf)
    return Added.of(terms.expand(*terms.shape[:2], piece.height, piece.width))


def hidden_key(given: Ingredients, call: Call) -> Hashable:
    """Calls whose keys are equal hide the same pairs."""
    piece = call.tile
    return (
        given.query.dtype,
        given.device,
        piece.height,
        *((piece.batch.start, piece.batch.stop) if given.rule.shape[0] > 1 else ()),
        *((piece.heads.start, piece.heads.stop) if given.rule.shape[1] > 1 else ()),
        *((len(strip.keys), strip.residual) for strip in piece.columns),
    )


def is_kept(entries: int, held: int) -> bool:
    """Whether residual terms may stay with their plan, which holds so many entries of them already."""
    return entries + held <= _MEMO_ENTRIES


def _hidden(given: Ingredients, call: Call) -> Added:
    """0 where allowed and -inf elsewhere, in the query's dtype; kept with the plan where the rule is a value."""
    key = hidden_key(given, call)
    memo = given.plan.memo if given.rule.is_value else {}
    kept = memo.get(key)
    if isinstance(kept, Added):
        return kept
    with unobserved() if given.rule.is_value else nullcontext():
        found = made(given, call.tile)
    held = sum(x.terms.numel() for x in list(memo.values()) if isinstance(x, Added) and x.terms is not None)
    if found.terms is not None and is_kept(found.terms.numel(), held):
        memo[key] = found
    return found


def made(given: Ingredients, piece: Tile) -> Added:
    """The same for some tile, made anew."""
    seen = allowed(given, piece)
    assert seen is not None  # some strip is unsure
    if given.rule.is_value:  # what is kept is for all items and heads that the rule does not tell apart
        items, heads = given.rule.shape
        seen = seen[: 1 if items == 1 else None, : 1 if heads == 1 else None]
    terms = torch.full(seen.shape, -math.inf, dtype=given.query.dtype, device=given.device)
    terms.masked_fill_(seen, 0.0)
    empty = ~seen.any(-1)
    return Added(terms, empty if bool(empty.any()) else None)
