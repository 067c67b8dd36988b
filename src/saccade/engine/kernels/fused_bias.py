"""What torch's flash operation is to add to the scores of a call: the bias, and -inf where a pair is hidden."""

from __future__ import annotations

import math
from collections.abc import Hashable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.inputs import AttentionInputs
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


def added(inputs: AttentionInputs, call: Call) -> Added:
    """Bias, and -inf at hidden pairs, for the rows and columns of a call."""
    hidden = NOTHING if call.causal or call.is_sure else _hidden(inputs, call)
    return hidden if inputs.bias is None or not call.tile.columns else with_bias(inputs, call.tile, hidden.terms)


def with_bias(inputs: AttentionInputs, piece: Tile, hidden: Tensor | None) -> Added:
    """The bias of a tile, and -inf where the other terms, if there are any, are -inf."""
    assert inputs.bias is not None  # who calls has looked
    bias = inputs.bias.read(piece)
    bias = bias if bias.dtype == torch.float32 else bias.to(inputs.query.dtype)  # the operation takes these two
    bias = bias if bias.stride(3) in (0, 1) else bias.contiguous()  # the operation would do it in each call
    # Filled, not added: a NaN in the bias at a hidden pair is hidden too.
    terms = bias if hidden is None else bias.masked_fill(hidden == -math.inf, -math.inf)
    return Added.of(terms.expand(*terms.shape[:2], piece.height, piece.width))


def hidden_key(inputs: AttentionInputs, call: Call) -> Hashable:
    """Calls whose keys are equal hide the same pairs."""
    piece = call.tile
    return (
        inputs.query.dtype,
        inputs.device,
        piece.height,
        *((piece.batch.start, piece.batch.stop) if inputs.rule.shape[0] > 1 else ()),
        *((piece.heads.start, piece.heads.stop) if inputs.rule.shape[1] > 1 else ()),
        *((len(strip.keys), strip.residual) for strip in piece.columns),
    )


def is_kept(entries: int, held: int) -> bool:
    """Whether residual terms may stay with their plan, which holds so many entries of them already."""
    return entries + held <= _MEMO_ENTRIES


def _hidden(inputs: AttentionInputs, call: Call) -> Added:
    """0 where allowed and -inf elsewhere, in the query's dtype; kept with the plan where the rule is a value."""
    key = hidden_key(inputs, call)
    memo = inputs.plan.memo if inputs.rule.is_value else {}
    kept = memo.get(key)
    if isinstance(kept, Added):
        return kept
    with unobserved() if inputs.rule.is_value else nullcontext():
        found = made(inputs, call.tile)
    held = sum(x.terms.numel() for x in list(memo.values()) if isinstance(x, Added) and x.terms is not None)
    if found.terms is not None and is_kept(found.terms.numel(), held):
        memo[key] = found
    return found


def made(inputs: AttentionInputs, piece: Tile) -> Added:
    """The same for some tile, made anew."""
    seen = allowed(inputs, piece)
    assert seen is not None  # some strip is unsure
    if inputs.rule.is_value:  # what is kept is for all items and heads that the rule does not tell apart
        items, heads = inputs.rule.shape
        seen = seen[: 1 if items == 1 else None, : 1 if heads == 1 else None]
    terms = torch.full(seen.shape, -math.inf, dtype=inputs.query.dtype, device=inputs.device)
    terms.masked_fill_(seen, 0.0)
    empty = ~seen.any(-1)
    return Added(terms, empty if bool(empty.any()) else None)
