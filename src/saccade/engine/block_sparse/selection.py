"""Select the highest-scoring key blocks for each query."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.engine.block_sparse.index import row_bounds
from saccade.engine.inputs import AttentionInputs
from saccade.plan.key_ranges import Bounds
from saccade.support.errors import value_error
from saccade.support.numerics import any_true

_ENTRIES, _FEWEST = 1 << 18, 32  # number of scores processed at a time, and the smallest number of rows
_MOST_RANGES = 8  # with at most this many ranges per row, visible keys are counted without evaluating pairs


def stable_topk(scores: Tensor, k: int) -> Tensor:
    """Return the indices of the ``k`` largest scores of each row, int64 ``[..., k]``. Ties go to the first entries.

    Unlike with ``topk``, the choice between equal entries does not depend on later entries of the row. NaN counts as
    the largest value.

    Cost: the same as ``topk``, plus one pass to detect ties. Only rows with a tie for the last selected entry are
    recomputed.
    """
    top = scores.topk(k, -1, sorted=False)
    if k == 0:
        return top.indices
    is_nan = top.values.isnan()
    least = top.values.masked_fill(is_nan, math.inf).amin(-1, keepdim=True)
    tied = (scores == least).sum(-1) > (top.values == least).sum(-1)
    tied &= (least[..., 0] > -math.inf) & ~is_nan.all(-1)
    if any_true(tied):
        rows, low = scores[tied], least[tied]
        above, equal = (rows > low) | rows.isnan(), rows == low
        missing = k - above.sum(-1, keepdim=True)
        is_top = above | (equal & (equal.cumsum(-1) <= missing))
        top.indices[tied] = is_top.nonzero()[:, 1].view(-1, k)
    return top.indices


def select_blocks(inputs: AttentionInputs, score: Callable[[range, int], Tensor], k: int, size: int) -> Tensor:
    """Return the blocks selected for each query, int32 ``[batch | 1, heads | kv_heads | 1, q_len, slots]``.

    The ``k`` highest-scoring blocks among those visible to the query are selected. Ties go to the lower positions.
    Blocks of several keys that are only partly visible are always selected, and count towards ``k``. The format is
    described in `saccade.engine.block_sparse.selected_blocks.SelectedBlocks`.

    Args:
        inputs: the checked inputs.
        score: ``(rows, stop) -> scores``; see `saccade.scorers.Scorer.on`.
        k: number of blocks to select for each query.
        size: number of keys in a block.

    Cost: the scores are computed a chunk of rows at a time, with one ``topk`` for each chunk.
    """
    batch, heads, q_len, kv_len = inputs.shape
    blocks, parts = -(-kv_len // size), []
    step = max(_FEWEST, _ENTRIES // max(1, batch * heads * blocks))
    for first in range(0, q_len, step):
        rows = range(first, min(first + step, q_len))
        bounds = row_bounds(inputs, inputs.rule, rows)
        stop = min(kv_len, int(bounds.any_row.ends.max(initial=0)) - inputs.origin[1])
        if stop <= 0 or int(bounds.any_row.sizes().sum()) == 0:
            parts.append(torch.full((1, 1, len(rows), 1), blocks, dtype=torch.int32, device=inputs.device))
            continue
        scores = score(rows, stop).detach().float()
        index = _select_in_rows(inputs, scores, bounds, rows, stop, k, size)
        parts.append(index.masked_fill_(index < 0, blocks).sort(-1).values)
    slots = max(part.shape[3] for part in parts)
    sizes = [max(part.shape[axis] for part in parts) for axis in (0, 1)]
    wide = [F.pad(part, (0, slots - part.shape[3]), value=blocks).expand(*sizes, -1, -1) for part in parts]
    return torch.cat(wide, 2)


def _select_in_rows(
    inputs: AttentionInputs, scores: Tensor, bounds: Bounds, rows: range, stop: int, k: int, size: int
) -> Tensor:
    """Return the key blocks selected for some rows, int32 ``[batch | 1, sharing, rows, slots]``, -1 in unused slots."""
    heads, count, sharing = inputs.shape[1], -(-stop // size), scores.shape[1]
    _check_scores(scores, inputs, len(rows), (stop, count))
    counts, visible = _count_visible(inputs, bounds, rows, stop, size, needs_keys=scores.shape[3] == stop and size > 1)
    counts = _over_sharing_heads(counts, sharing, heads)
    if visible is not None:  # scores of keys: the score of a block is the largest score of its visible keys
        scores = scores.masked_fill(~_over_sharing_heads(visible[..., None], sharing, heads)[..., 0], -math.inf)
        scores = F.pad(scores, (0, count * size - stop), value=-math.inf).unflatten(-1, (count, size)).amax(-1)
    sees_some, sees_all = counts[..., 1] > 0, counts[..., 0] == size  # a short last block counts as partly visible
    scores = scores.expand(max(len(scores), len(counts)), -1, -1, -1)
    scores = scores.masked_fill(sees_some & ~sees_all, math.inf).masked_fill(~sees_some, -math.inf)
    num_forced = int((scores == math.inf).sum(-1).max()) if size > 1 else 0
    index = stable_topk(scores, min(count, max(k, num_forced)))
    values = scores.gather(-1, index)
    if num_forced > k:  # rows with fewer forced blocks are filled up to k blocks only
        values, order = values.sort(dim=-1, descending=True, stable=True)
        index = index.gather(-1, order)
        values[..., k:].masked_fill_(values[..., k:] < math.inf, -math.inf)
    return index.int().masked_fill_(values == -math.inf, -1)


def _check_scores(scores: Tensor, inputs: AttentionInputs, rows: int, widths: tuple[int, int]) -> None:
    """Raise an error unless the scores have one row per query and one column per key or per block."""
    (batch, heads, _, _), groups, shape = inputs.shape, inputs.key.shape[1], tuple(scores.shape)
    fits = len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, groups, heads) and shape[2] == rows
    if not fits or shape[3] not in widths:
        rule = f"be [{batch}, 1 | {groups} | {heads}, {rows}, {widths[0]} keys or {widths[1]} blocks]"
        raise value_error("scores", rule, list(shape))


def _over_sharing_heads(x: Tensor, sharing: int, heads: int) -> Tensor:
    """Combine all heads that share selected blocks in ``x [items, heads | 1, ...]``.

    Bools, which mark visible keys, are combined by `any`; counts of visible keys by minimum and maximum.
    """
    if x.shape[1] == 1:
        return x
    per_group = x.unflatten(1, (sharing, heads // sharing))
    if x.dtype == torch.bool:
        return per_group.any(2)
    return torch.stack([per_group[..., 0].amin(2), per_group[..., 1].amax(2)], -1)


def _count_visible(
    inputs: AttentionInputs, bounds: Bounds, rows: range, stop: int, size: int, *, needs_keys: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the number of visible keys in each block for each row, ``[items, heads | 1, rows, blocks, 2]``.

    The last axis contains the minimum and the maximum over heads. The second result marks the visible keys, bool
    ``[items, heads | 1, rows, stop]``; it is None unless ``needs_keys`` is set.
    """
    any_row, all_rows = bounds
    is_exact = bounds.is_exact or bool((any_row.sizes() == all_rows.sizes()).all())
    count = -(-stop // size)
    if is_exact and any_row.starts.shape[1] <= _MOST_RANGES:
        unit = 1 if needs_keys else size
        first = torch.arange(0, stop, unit, device=inputs.device)
        last = (first + unit).clamp(max=stop)
        total = torch.zeros(1, dtype=torch.int32, device=inputs.device)
        for start, end in zip(any_row.starts.T, any_row.ends.T, strict=True):
            low, high = (torch.from_numpy(x - inputs.origin[1]).to(inputs.device)[:, None] for x in (start, end))
            total = total + (torch.minimum(last, high) - torch.maximum(first, low)).clamp_(min=0).int()
        total = total.view(-1, 1, len(rows), len(first))
        if not needs_keys:
            return torch.stack([total, total], -1), None
        visible = total > 0
    else:
        visible = _allowed(inputs, rows, stop)
    in_block = F.pad(visible, (0, count * size - stop)).unflatten(-1, (count, size)).sum(-1)
    return torch.stack([in_block, in_block], -1), visible if needs_keys else None


def _allowed(inputs: AttentionInputs, rows: range, stop: int) -> Tensor:
    """Return which of the first ``stop`` keys each row may attend to, bool ``[batch | 1, heads | 1, rows, stop]``."""
    mask, (batch, heads, _, _), (q_first, kv_first) = inputs.rule, inputs.shape, inputs.origin
    sizes = (batch, heads) if mask.calls_functions else (min(batch, mask.shape[0]), min(heads, mask.shape[1]))
    b, h = (torch.arange(size, device=inputs.device) for size in sizes)
    q = torch.arange(rows.start + q_first, rows.stop + q_first, device=inputs.device)
    kv = torch.arange(kv_first, kv_first + stop, device=inputs.device)
    allowed = mask.allows(
        b[:, None, None, None], h[None, :, None, None], q[None, None, :, None], kv[None, None, None, :]
    )
    return allowed.broadcast_to(*(max(x) for x in zip(allowed.shape[:2], (1, 1), strict=True)), len(rows), stop)
