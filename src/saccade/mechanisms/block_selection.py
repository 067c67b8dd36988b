"""The choice: which blocks of keys a scorer gives each query, as an index of them."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.engine.inputs import AttentionInputs
from saccade.engine.tiles.stable_topk import strongest
from saccade.mechanisms.scorers.base import ScoreRows
from saccade.plan import ALL, Groups
from saccade.plan.key_ranges import Bounds, Universe
from saccade.support.errors import value_error

__all__ = ["chosen_blocks"]

_ENTRIES, _FEWEST = 1 << 18, 32  # scores at a time, of so many rows at least
_MOST_RANGES = 8  # of a row, up to which keys are counted from them, without a look at pairs


def chosen_blocks(inputs: AttentionInputs, score: ScoreRows, k: int, size: int) -> Tensor:
    """Blocks that each query reads, int32 ``[batch | 1, heads | kv_heads | 1, q_len, slots]``; see `Chosen`.

    The ``k`` blocks that score highest of those that a query may see; a tie goes to the lower positions. Of blocks of
    several keys, those that it sees only in part are always read, and count.

    Cost: the scores, some rows at a time, and their ``topk``.
    """
    batch, heads, q_len, kv_len = inputs.shape
    blocks, parts = -(-kv_len // size), []
    step = max(_FEWEST, _ENTRIES // max(1, batch * heads * blocks))
    for first in range(0, q_len, step):
        rows = range(first, min(first + step, q_len))
        bounds = _bounds(inputs, rows)
        stop = min(kv_len, int(bounds.needed.ends.max(initial=0)) - inputs.origin[1])
        if stop <= 0 or int(bounds.needed.sizes().sum()) == 0:
            parts.append(torch.full((1, 1, len(rows), 1), blocks, dtype=torch.int32, device=inputs.device))
            continue
        scores = score(rows, stop).detach().float()
        index = _of_rows(inputs, scores, bounds, rows, stop, k, size)
        parts.append(index.masked_fill_(index < 0, blocks).sort(-1).values)
    slots = max(part.shape[3] for part in parts)
    sizes = [max(part.shape[axis] for part in parts) for axis in (0, 1)]
    wide = [F.pad(part, (0, slots - part.shape[3]), value=blocks).expand(*sizes, -1, -1) for part in parts]
    return torch.cat(wide, 2)


def _of_rows(
    inputs: AttentionInputs, scores: Tensor, bounds: Bounds, rows: range, stop: int, k: int, size: int
) -> Tensor:
    """Blocks for some rows, int32 ``[batch | 1, sharing, rows, slots]``, -1 in slots that are not used."""
    _batch, heads, _, _ = inputs.shape
    count = -(-stop // size)
    _check(scores, inputs, len(rows), (stop, count))
    seen, kept = _seen(inputs, bounds, rows, stop, size, scores.shape[3] == stop and size > 1)
    items = max(len(scores), len(seen))
    sharing = scores.shape[1]
    seen = _of_all(seen, sharing, heads)
    if kept is not None:  # scores of keys: of each block the largest that may be seen
        scores = scores.masked_fill(~_of_all(kept[..., None], sharing, heads)[..., 0], -math.inf)
        scores = F.pad(scores, (0, count * size - stop), value=-math.inf).unflatten(-1, (count, size)).amax(-1)
    some, every = seen[..., 1] > 0, seen[..., 0] == size  # the last block may be short: as if the rest were hidden
    scores = scores.expand(items, -1, -1, -1)
    scores = scores.masked_fill(some & ~every, math.inf).masked_fill(~some, -math.inf)
    always = int((scores == math.inf).sum(-1).max()) if size > 1 else 0
    most = min(count, max(k, always))
    index = strongest(scores, most)
    values = scores.gather(-1, index)
    if always > k:  # where fewer are always read, others fill up k places only
        values, order = values.sort(dim=-1, descending=True, stable=True)
        index = index.gather(-1, order)
        values[..., k:].masked_fill_(values[..., k:] < math.inf, -math.inf)
    return index.int().masked_fill_(values == -math.inf, -1)


def _check(scores: Tensor, inputs: AttentionInputs, rows: int, widths: tuple[int, int]) -> None:
    batch, heads, _, _ = inputs.shape
    groups = inputs.key.shape[1]
    shape = tuple(scores.shape)
    fits = len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, groups, heads) and shape[2] == rows
    if not fits or shape[3] not in widths:
        rule = f"be [{batch}, 1 | {groups} | {heads}, {rows}, {widths[0]} keys or {widths[1]} blocks]"
        raise value_error("scores", rule, list(shape))


def _of_all(x: Tensor, sharing: int, heads: int) -> Tensor:
    """Counts ``[items, heads | 1, ...]`` of pairs as those of heads that share a choice: least and most of them."""
    if x.shape[1] == 1:
        return x
    each = x.unflatten(1, (sharing, heads // sharing))
    if x.dtype == torch.bool:
        return each.any(2)
    return torch.stack([each[..., 0].amin(2), each[..., 1].amax(2)], -1)


def _bounds(inputs: AttentionInputs, rows: range) -> Bounds:
    """What each row needs, and surely has; row by row, item by item where the rule tells them apart."""
    rule, (batch, _, _, kv_len), (q_first, kv_first) = inputs.rule, inputs.shape, inputs.origin
    items = [ALL] if rule.shape[0] == 1 else list(range(batch))
    row = np.tile(np.arange(rows.start + q_first, rows.stop + q_first, dtype=np.int64), len(items))
    keys = Universe(np.full_like(row, kv_first), np.full_like(row, kv_first + kv_len))
    return rule.bounds(Groups(np.repeat(np.asarray(items, dtype=np.int64), len(rows)), row, row), keys)


def _seen(
    inputs: AttentionInputs, bounds: Bounds, rows: range, stop: int, size: int, asks_keys: bool
) -> tuple[Tensor, Tensor | None]:
    """How many keys of each block the rows see, ``[items, heads | 1, rows, blocks, 2]``: of all heads least and most.

    The second says which of the keys they are, bool ``[items, heads | 1, rows, stop]``, where that is asked.
    """
    needed, sure = bounds
    is_exact = bounds.is_exact or bool((needed.sizes() == sure.sizes()).all())
    count = -(-stop // size)
    if is_exact and needed.starts.shape[1] <= _MOST_RANGES:
        unit = 1 if asks_keys else size
        first = torch.arange(0, stop, unit, device=inputs.device)
        last = (first + unit).clamp(max=stop)
        held = torch.zeros(1, dtype=torch.int32, device=inputs.device)
        for start, end in zip(needed.starts.T, needed.ends.T, strict=True):
            own = [torch.from_numpy(x - inputs.origin[1]).to(inputs.device)[:, None] for x in (start, end)]
            held = held + (torch.minimum(last, own[1]) - torch.maximum(first, own[0])).clamp_(min=0).int()
        held = held.view(-1, 1, len(rows), len(first))
        if not asks_keys:
            return torch.stack([held, held], -1), None
        kept = held > 0
    else:
        kept = _allowed(inputs, rows, stop)
    each = F.pad(kept, (0, count * size - stop)).unflatten(-1, (count, size)).sum(-1)
    return torch.stack([each, each], -1), kept if asks_keys else None


def _allowed(inputs: AttentionInputs, rows: range, stop: int) -> Tensor:
    """What the rule says, pair by pair, bool ``[batch | 1, heads | 1, rows, stop]``."""
    rule, (batch, heads, _, _), (q_first, kv_first) = inputs.rule, inputs.shape, inputs.origin
    items, several = (batch, heads) if rule.asks_functions else (min(batch, rule.shape[0]), min(heads, rule.shape[1]))
    b, h = (torch.arange(size, device=inputs.device) for size in (items, several))
    q = torch.arange(rows.start + q_first, rows.stop + q_first, device=inputs.device)
    kv = torch.arange(kv_first, kv_first + stop, device=inputs.device)
    seen = rule.allows(b[:, None, None, None], h[None, :, None, None], q[None, None, :, None], kv[None, None, None, :])
    return seen.broadcast_to(*(max(x) for x in zip(seen.shape[:2], (1, 1), strict=True)), len(rows), stop)
