"""The scores of a tile, and the softmax of complete rows.

Operations are applied in this order: scale, softcap, the user's score function, bias, mask.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.bias.sink_logit import log_share
from saccade.engine.block_sparse.selected_blocks import at_positions
from saccade.engine.inputs import AttentionInputs
from saccade.engine.tiles.grouped_heads import grouped, groups_of, joined, product, take
from saccade.plan import Ranges, Tile
from saccade.support.called_function import called_function
from saccade.support.torch_modes import has_values, is_transformed, unobserved

ROOM_FOR_HIDDEN = 1 << 23  # entries of masked pairs that a plan may cache: 8 MB
_NEVER = -1000.0  # exp(x) and 0 * x are 0 in every dtype, so unlike -inf, this number needs no special case


def scores_of(inputs: AttentionInputs, tile: Tile) -> Tensor:
    """Compute the scores of a tile, ``[batch, heads, rows, columns]`` in the compute dtype, -inf for masked pairs."""
    groups = groups_of(tile.heads, inputs.shape[1], inputs.key.shape[1])
    q = take(inputs.query[tile.batch, tile.heads], (tile.rows,), 2).to(inputs.compute_dtype)
    k = take(inputs.key[tile.batch, groups], joined(tile.spans), 2).to(inputs.compute_dtype)
    scores = visible_scores(inputs, q, k, None if inputs.bias is None else inputs.bias.read(tile), tile)
    if _can_write(scores):
        return mask_(inputs, scores, tile)
    visible = allowed(inputs, tile)
    return scores if visible is None else scores.masked_fill(~visible, -math.inf)


def visible_scores(inputs: AttentionInputs, q: Tensor, k: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
    """Compute the scores of a tile before masking, from the queries, keys and bias of the tile."""
    scores = product(q * inputs.scale, k.mT) if inputs.tile_function is None else compared(inputs, q, k)
    return biased(inputs, modified(inputs, capped(inputs, scores), tile), bias)


def _can_write(scores: Tensor) -> bool:
    """Return whether scores may be changed in place, that is, neither autograd nor a transform records operations."""
    return not (scores.requires_grad or is_transformed())


def compared(inputs: AttentionInputs, q: Tensor, k: Tensor) -> Tensor:
    """Compute the scaled scores of a tile with the score's tile function, ``[batch, heads, rows, columns]``."""
    function, parameters = inputs.tile_function, inputs.parameters
    assert function is not None  # callers have checked
    return grouped(lambda left, right: function(left, right, *parameters), q, k) * inputs.scale


def capped(inputs: AttentionInputs, scores: Tensor) -> Tensor:
    """Apply the softcap to the scaled scores of a tile, in place if no gradient is recorded."""
    if inputs.softcap is None:
        return scores
    if not _can_write(scores):
        return inputs.softcap * torch.tanh(scores / inputs.softcap)
    return scores.div_(inputs.softcap).tanh_().mul_(inputs.softcap)


def modified(inputs: AttentionInputs, scores: Tensor, tile: Tile) -> Tensor:
    """Apply the user's score function to the capped scores of a tile. The function may modify the scores in place."""
    if inputs.modification is None:
        return scores
    return inputs.modification(scores, score_mod_indices(inputs, tile))


def score_mod_indices(inputs: AttentionInputs, tile: Tile) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the batch items, heads and positions (0 for padding) of a tile as arguments of a score function."""
    b, h, _ = index_of(inputs, tile)
    q, kv = positions(inputs, tile)
    return (b, h, q, kv) if at_positions(inputs.rule) is None else (b, h, q.clamp_min(0), kv.clamp_min(0))


def biased(inputs: AttentionInputs, scores: Tensor, bias: Tensor | None) -> Tensor:
    """Add a tile's part of the bias to its capped scores, in place if no gradient is recorded."""
    if bias is None:
        return scores
    bias = bias.to(inputs.compute_dtype)
    return scores.add_(bias) if _can_write(scores) and not bias.requires_grad else scores + bias


def mask_(inputs: AttentionInputs, scores: Tensor, tile: Tile) -> Tensor:
    """Set the scores of a tile's masked pairs to -inf in place, skipping column ranges without masked pairs."""
    start = 0
    for strip in tile.columns if has_values(scores) else ():
        stop = start + len(strip.keys)
        if strip.partial is not True:
            masked = _cached_hidden(inputs, tile._replace(columns=(strip,)))
            scores[..., start:stop].masked_fill_(masked, -math.inf)
        start = stop
    return scores


def caches_hidden(inputs: AttentionInputs) -> bool:
    """Return whether the masked pairs of tiles are cached with the plan."""
    return inputs.rule.is_value and inputs.rule.shape == (1, 1)


def key_of_hidden(inputs: AttentionInputs, tile: Tile) -> Hashable:
    """Return a cache key for the masked pairs of a tile with one column range. Equal keys mean equal masked pairs."""
    (strip,) = tile.columns
    return ("hidden", inputs.device, tile.height, len(strip.keys), strip.partial)


def _cached_hidden(inputs: AttentionInputs, tile: Tile) -> Tensor:
    """Return the masked pairs of a tile with one column range, cached with the plan if the mask cannot change."""
    if not caches_hidden(inputs):
        return hidden(inputs, tile)
    key, memo = key_of_hidden(inputs, tile), inputs.plan.memo
    cached = memo.get(key)
    if isinstance(cached, Tensor):
        return cached
    with unobserved():
        masked = hidden(inputs, tile)
    room = memo.get("room for hidden", ROOM_FOR_HIDDEN)
    if isinstance(room, int) and masked.numel() <= room:
        memo[key], memo["room for hidden"] = masked, room - masked.numel()
    return masked


def hidden(inputs: AttentionInputs, tile: Tile) -> Tensor:
    """Return the masked pairs in a tile's partial column ranges, bool ``[batch | 1, heads | 1, rows, columns]``."""
    visible = allowed(inputs, tile)
    assert visible is not None  # some column range is partial
    # A mask that distinguishes no batch items may still return a result for each.
    return ~(visible[:1, :1] if caches_hidden(inputs) else visible)


def allowed(inputs: AttentionInputs, tile: Tile) -> Tensor | None:
    """Return the allowed pairs of a tile, bool ``[batch | 1, heads | 1, rows, columns]``; None if all are allowed."""
    if all(strip.partial is True for strip in tile.columns):
        return None
    b, h, q = index_of(inputs, tile)
    parts = []
    for strip in tile.columns:
        if strip.partial is True:
            parts.append(torch.ones(1, 1, 1, len(strip.keys), dtype=torch.bool, device=inputs.device))
        else:
            parts.append(tile.rule.allows(b, h, q, _columns_of(inputs, (strip.keys,))))
    sizes = torch.broadcast_shapes(*(part.shape[:3] for part in parts), (1, 1, tile.height))
    wide = [part.expand(*sizes, len(strip.keys)) for part, strip in zip(parts, tile.columns, strict=True)]
    visible = wide[0] if len(wide) == 1 else torch.cat(wide, 3)
    if inputs.fingerprints is not None and inputs.rule.calls_functions:
        _check_fingerprint(inputs, tile, visible)
    return visible


def index_of(inputs: AttentionInputs, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    """Return the batch items, heads and rows of a tile as arguments of a mask, int64 along separate axes."""
    b, h = (torch.arange(span.start, span.stop, device=inputs.device) for span in (tile.batch, tile.heads))
    q = _index_tensor((tile.rows,), inputs.origin[0], inputs.device)
    return b[:, None, None, None], h[None, :, None, None], q[None, None, :, None]


def _columns_of(inputs: AttentionInputs, spans: Ranges) -> Tensor:
    """Return the columns of a tile in the coordinates of the mask, int64 ``[1, 1, 1, columns]``."""
    return _index_tensor(spans, inputs.origin[1], inputs.device)[None, None, None, :]


def positions(inputs: AttentionInputs, tile: Tile) -> tuple[Tensor, Tensor]:
    """Return a tile's query and key positions, int64 ``[batch | 1, 1, rows, 1]``, ``[batch | 1, 1, 1, columns]``."""
    b, _, q = index_of(inputs, tile)
    kv = _columns_of(inputs, tile.spans)
    placed = at_positions(inputs.rule)
    if placed is not None:
        return placed.positions(b, q, kv)
    return (q if inputs.row_positions is None else inputs.row_positions[q]), kv


def _index_tensor(spans: Ranges, first: int, device: torch.device) -> Tensor:
    parts = [torch.arange(span.start + first, span.stop + first, span.step, device=device) for span in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _check_fingerprint(inputs: AttentionInputs, tile: Tile, visible: Tensor) -> None:
    """Raise an error if a mask function returns a different result for a tile than in the forward pass."""
    rows = torch.arange(visible.shape[2], device=inputs.device) * 1_000_003
    columns = torch.arange(visible.shape[3], device=inputs.device) * 7_919
    marks = (rows[:, None] + columns + 12_345) % 2_147_483_647
    fingerprint = int((visible * marks).sum())
    place = (tile.batch.start, tile.heads.start, tile.rows, tile.columns)
    if inputs.fingerprints is not None and inputs.fingerprints.setdefault(place, fingerprint) != fingerprint:
        hint = "bind what the function reads, e.g. lambda b, h, q, kv, n=n: kv < n, or pass a tensor"
        sentence = (
            f"{called_function()}: mask must return the same result in the "
            "forward and backward pass; got a different one."
        )
        raise RuntimeError(f"{sentence}\nHint: {hint}")


def normalised(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax and the lse of complete rows of scores. A row of only -inf gets weights 0 and lse -inf."""
    if scores.shape[-1] == 0:
        return scores, scores.new_full(scores.shape[:-1], -math.inf)
    peak = scores.detach().amax(-1, keepdim=True)
    empty = peak == -math.inf
    # Use exp(0 - 0) for empty rows until the end, so that no NaN arises in the backward pass.
    shifted = (scores - peak.masked_fill(empty, 0.0)).masked_fill(empty, 0.0)
    exponentials = shifted.exp()
    total = exponentials.sum(-1, keepdim=True)
    weights = (exponentials / total).masked_fill(empty, 0.0)
    lse = (total.log() + peak.masked_fill(empty, 0.0)).masked_fill(empty, -math.inf)
    return weights, lse[..., 0]


class Rows(NamedTuple):
    """The softmax of complete rows of scores.

    Attributes:
        weights: ``[batch, heads, rows, columns]``; 0 in a row without visible keys.
        logs: logarithms of the weights, bounded below by about -1000, even for weights of 0. None if gradients are
            recorded, because everything is then computed out of place.
        lse: log of the denominators, ``[batch, heads, rows]``, including a sink.
    """

    weights: Tensor
    logs: Tensor | None
    lse: Tensor


def softmax_rows(inputs: AttentionInputs, tile: Tile, *, differentiable: bool) -> Rows:
    """Compute the softmax of a tile of complete rows, for code that needs the weights themselves."""
    scores = scores_of(inputs, tile)
    sink = None if inputs.sink_logit is None else inputs.sink_logit[tile.heads]
    if differentiable:
        weights, lse = normalised(scores)
        if sink is not None:
            share = log_share(lse, sink)
            weights, lse = weights * share.exp()[..., None], lse - share
        return Rows(weights, None, lse)
    peak = scores.amax(-1, keepdim=True)
    empty = peak == -math.inf
    logs = scores.sub_(peak.masked_fill(empty, 0.0)).clamp_min_(_NEVER)
    weights = logs.exp()
    total = weights.sum(-1, keepdim=True).masked_fill_(empty, 1.0)
    log_total = total.log()
    if sink is not None:
        log_total -= log_share((log_total + peak)[..., 0], sink)[..., None]
        total = log_total.exp()
    return Rows(weights.div_(total), logs.sub_(log_total), (log_total + peak)[..., 0])
