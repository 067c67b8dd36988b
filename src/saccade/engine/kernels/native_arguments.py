"""Arguments for the compiled kernel (the plan of a mask, and the tensors of a call), and the cost of a call."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from saccade.engine.bias.decay_sums import DecayTerm
from saccade.engine.bias.relative import DistanceTerm
from saccade.engine.bias.term import MaskedTerm, Term
from saccade.engine.dropout import Dropped, Words
from saccade.engine.inputs import AttentionInputs
from saccade.engine.memory_accounting import Cost, Ledger, MemoryUse, Probe
from saccade.engine.tiles.tile_scores import allowed, index_of, positions
from saccade.plan import ALL, ColumnRange, Groups, Tile
from saccade.plan.key_ranges import Bounds, Ints, KeyDomain, Spans
from saccade.support.torch_modes import unobserved

ROWS, PANEL = 24, 64  # rows of a block and keys of a panel, as in the C++ sources
_MOST_BITS = 1 << 29  # most bits for a mask whose bounds are not exact: 64 MB
_PAIRS_AT_ONCE = 1 << 20  # number of pairs evaluated at a time
_MOST_SPANS = 64  # most ranges per row: beyond this number, bits take less memory
_WHOLE, _LIMITED, _RESIDUAL = range(3)


class NativePlan(NamedTuple):
    """The compiled kernel's plan: the allowed pairs of a mask, for blocks of `ROWS` queries and panels of `PANEL` keys.

    Attributes:
        starts: int32 ``[items * blocks + 1]``: index in ``runs`` of the first run of each block of `ROWS` rows.
            ``items`` is 1 if all batch items have the same mask.
        runs: int32 ``[runs, 3]``: first panel, last panel + 1, and kind of each run of panels. The visible keys are all
            keys for kind 0, the keys in the row's spans for kind 1, and the keys whose bits are set for kind 2.
        spans: int32 ``[items, q_len, spans, 2]``: the keys of each row, as ranges.
        is_exact: whether spans describe all pairs, so that no bits are needed.
    """

    starts: Tensor
    runs: Tensor
    spans: Tensor
    is_exact: bool

    @classmethod
    def of(cls, inputs: AttentionInputs) -> NativePlan | None:
        """Build the compiled kernel's plan; return None if bounds are inexact and there are too many pairs for bits."""
        rule, (batch, _, q_len, kv_len), (q_first, kv_first) = inputs.rule, inputs.shape, inputs.origin
        if 0 in inputs.shape:
            blocks = -(-q_len // ROWS)
            none = [torch.zeros(size, dtype=torch.int32) for size in ((blocks + 1,), (0, 3), (1, q_len, 0, 2))]
            return cls(none[0], none[1], none[2], True)
        if inputs.plan.is_full:
            return _full_plan(q_len, kv_len)
        items = [ALL] if rule.shape[0] == 1 or batch == 1 else list(range(batch))
        first = np.tile(np.arange(q_first, q_first + q_len, ROWS, dtype=np.int64), len(items))
        last = np.minimum(first + ROWS, q_first + q_len) - 1
        blocks = len(first) // len(items)
        groups = Groups(np.repeat(np.asarray(items, dtype=np.int64), blocks), first, last)
        bounds = rule.bounds(groups, _key_domain(first, kv_first, kv_len))
        starts, runs = _panel_runs(inputs, bounds, first)
        is_whole = not (runs[:, 2] == _LIMITED).any()
        few = bounds.any_row.starts.shape[1] <= _MOST_SPANS and not is_whole
        exact = _exact_spans(inputs, items) if few else None
        is_exact = is_whole or exact is not None
        if not is_exact and math.prod(_num_distinct(inputs)) * q_len * kv_len > _MOST_BITS:
            return None
        runs[runs[:, 2] == _LIMITED, 2] = _LIMITED if is_exact else _RESIDUAL
        spans = np.zeros((len(items), q_len, 0, 2), dtype=np.int64) if exact is None else exact
        arrays = [torch.from_numpy(np.ascontiguousarray(x, np.int32)) for x in (starts, runs, spans)]
        return cls(arrays[0], arrays[1], arrays[2], is_exact)

    def pairs(self, inputs: AttentionInputs) -> int:
        """Return the number of query-key pairs in the panels of all blocks, summed over batch and heads."""
        batch, heads, q_len, kv_len = inputs.shape
        blocks = -(-q_len // ROWS)
        block = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts.numpy())) % max(blocks, 1)
        rows = np.minimum(ROWS, q_len - block * ROWS)
        first, stop, _ = self.runs.numpy().astype(np.int64).T
        pairs = int((rows * (np.minimum(stop * PANEL, kv_len) - first * PANEL)).sum())
        return pairs * heads * (batch if len(self.spans) == 1 else 1)


def cached_plan(inputs: AttentionInputs) -> NativePlan | None:
    """Return the compiled kernel's plan (see `NativePlan.of`), cached with the plan of the mask."""
    memo = inputs.plan.memo
    if "native" not in memo:
        with unobserved():
            memo["native"] = NativePlan.of(inputs)
    return cast("NativePlan | None", memo["native"])


def known_plan(inputs: AttentionInputs) -> NativePlan:
    """Return the compiled kernel's plan for inputs that `Native.verdict` has accepted, so that it is never None."""
    plan = inputs.plan.memo.get("native") or cached_plan(inputs)
    assert plan is not None
    return cast("NativePlan", plan)


def cached_bits(inputs: AttentionInputs) -> Tensor:
    """Return the mask as one bit per pair, int64 ``[batch | 1, heads | 1, q_len, panels]``, cached with the plan."""
    memo = inputs.plan.memo
    if "native bits" not in memo:
        with unobserved():
            memo["native bits"] = _bits(inputs)
    return cast("Tensor", memo["native bits"])


def _bits(inputs: AttentionInputs) -> Tensor:
    words = torch.zeros(_shape_of_bits(inputs), dtype=torch.int64, device=inputs.device)
    word_bytes = words.numpy().view(np.uint8)
    for tile in _row_tiles(inputs):
        bits = np.packbits(cast("Tensor", allowed(inputs, tile)).numpy(), axis=-1, bitorder="little")
        word_bytes[:, :, tile.rows.start : tile.rows.stop, : bits.shape[-1]] = bits
    return words


def held_by_bits(inputs: AttentionInputs) -> MemoryUse:
    """Return the peak memory that `cached_bits` needs to evaluate the mask, and the memory of its result, in bytes."""
    words = 8 * math.prod(_shape_of_bits(inputs))
    held = Probe(inputs).held("bits", next(_row_tiles(inputs)), allowed)
    return MemoryUse(words + held.most, words)


@lru_cache
def _full_plan(q_len: int, kv_len: int) -> NativePlan:
    """Return the compiled kernel's plan for a mask that allows every pair."""
    blocks = -(-q_len // ROWS)
    runs = torch.tensor([[0, -(-kv_len // PANEL), _WHOLE]], dtype=torch.int32).repeat(blocks, 1)
    spans = torch.zeros((1, q_len, 0, 2), dtype=torch.int32)
    return NativePlan(torch.arange(blocks + 1, dtype=torch.int32), runs, spans, True)


def packed_bits(bools: Tensor) -> Tensor:
    """Pack bools ``[..., keys]`` into the bits of int64 words ``[..., panels]``."""
    packed = np.packbits(bools.numpy(force=True), axis=-1, bitorder="little")
    words = np.zeros((*bools.shape[:-1], -(-bools.shape[-1] // PANEL) * 8), dtype=np.uint8)
    words[..., : packed.shape[-1]] = packed
    return torch.from_numpy(words.view(np.int64))


def _key_domain(groups: Ints, first: int, count: int) -> KeyDomain:
    return KeyDomain(np.full_like(groups, first), np.full_like(groups, first + count))


def _exact_spans(inputs: AttentionInputs, items: list[int]) -> Ints | None:
    """Return the key ranges of each row, ``[items, q_len, spans, 2]``; None if they are inexact or too many."""
    (_, _, q_len, kv_len), (q_first, kv_first) = inputs.shape, inputs.origin
    batch_items = np.repeat(np.asarray(items, dtype=np.int64), q_len)
    rows = np.tile(np.arange(q_first, q_first + q_len, dtype=np.int64), len(items))
    bounds = inputs.rule.bounds(Groups(batch_items, rows, rows), _key_domain(rows, kv_first, kv_len))
    is_exact = bounds.is_exact or bool((bounds.any_row.sizes() == bounds.all_rows.sizes()).all())
    if not is_exact or bounds.any_row.starts.shape[1] > _MOST_SPANS:
        return None
    return (np.stack([bounds.any_row.starts, bounds.any_row.ends], 2) - kv_first).reshape(len(items), q_len, -1, 2)


def _panel_runs(inputs: AttentionInputs, bounds: Bounds, first: Ints) -> tuple[Ints, Ints]:
    """Return the arrays ``starts`` and ``runs`` of a `NativePlan`."""
    kv_first, panels = inputs.origin[1], _key_domain(first, 0, -(-inputs.shape[3] // PANEL))
    touched = _in_panels(bounds.any_row, kv_first, panels, out=True)
    whole = _in_panels(bounds.all_rows, kv_first, panels, kv_len=inputs.shape[3])
    parts = []
    for spans, kind in ((whole, _WHOLE), (touched.minus(whole, panels), _LIMITED)):
        block, slot = np.nonzero(spans.starts < spans.ends)
        columns = (block, spans.starts[block, slot], spans.ends[block, slot], np.full_like(block, kind))
        parts.append(np.stack(columns, 1))
    runs = np.concatenate(parts)
    runs = runs[np.lexsort((runs[:, 1], runs[:, 0]))]
    return np.searchsorted(runs[:, 0], np.arange(len(first) + 1)), runs[:, 1:]


def _in_panels(keys: Spans, first: int, panels: KeyDomain, *, out: bool = False, kv_len: int = 0) -> Spans:
    """Return the panels that lie entirely within key ranges or, with ``out``, contain at least one key of the ranges.

    The last panel may be incomplete. It lies within any range that includes all of its keys.
    """
    starts, ends = keys.starts - first, keys.ends - first
    if not out:
        return Spans.of(-(-starts // PANEL), np.where(ends == kv_len, ends + PANEL - 1, ends) // PANEL, panels)
    is_some = starts < ends
    return Spans.of(np.where(is_some, starts // PANEL, 0), np.where(is_some, -(-ends // PANEL), 0), panels)


def _num_distinct(inputs: AttentionInputs) -> tuple[int, int]:
    """Return the number of batch items and the number of heads that have separate mask bits."""
    return min(inputs.rule.shape[0], inputs.shape[0]), min(inputs.rule.shape[1], inputs.shape[1])


def _shape_of_bits(inputs: AttentionInputs) -> tuple[int, int, int, int]:
    return (*_num_distinct(inputs), inputs.shape[2], -(-inputs.shape[3] // PANEL))


def _row_tiles(inputs: AttentionInputs) -> Iterator[Tile]:
    """Yield tiles of a few rows in which mask bits are computed, for all batch items and heads with separate bits."""
    (items, heads), (q_len, kv_len) = _num_distinct(inputs), inputs.shape[2:]
    rows = max(1, _PAIRS_AT_ONCE // (items * heads * kv_len))
    for first in range(0, q_len, rows):
        columns = (ColumnRange(range(kv_len), "all pairs"),)
        yield Tile(slice(0, items), slice(0, heads), range(first, min(first + rows, q_len)), columns, inputs.rule)


_LANES = 16  # tensors whose width is a multiple of this need no copies
_TASKS = 16  # number of parallel tasks for sums over rows: with fewer heads, rows are split into parts


class Call(NamedTuple):
    """Arguments for one call to the compiled kernel, and the layout of the bias.

    Attributes:
        arguments: arguments shared by the forward and the backward pass.
        places: for a bias that depends on distance, the index of each distance in the source of the bias, starting with
            that of the first key and the last query; otherwise None.
        table: number of bias values that all rows share; 0 if each row has separate values, -1 without a bias.
        of_rows: the part of the bias that is the same for all keys of a row, float64 ``[batch, heads, q_len]``; None
            if it is 0. The kernel does not add this part.
    """

    arguments: tuple[Any, ...]
    places: Tensor | None
    table: int
    of_rows: Tensor | None = None

    @property
    def of_scores(self) -> tuple[Any, ...]:
        """Arguments that determine the scores, that is, all except those for values and dropout."""
        return (*self.arguments[:2], *self.arguments[3:-4])

    @classmethod
    def of(cls, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None, dtype: torch.dtype) -> Call:
        """Convert checked inputs to arguments for the compiled kernel, with query, key and value in ``dtype``."""
        plan, term = known_plan(inputs), inputs.bias
        bits = None if plan.is_exact else cached_bits(inputs)
        visible = None
        if isinstance(term, MaskedTerm):
            visible, term = packed_bits(~term.keys), term.term
        bias, index, table = (None, None, -1) if term is None else _bias_rows(term, inputs.shape)
        of_rows = term.of_rows() if isinstance(term, DecayTerm) else None
        rows, columns, threshold, keep_factor = None, None, 0, 1.0
        if dropped is not None:
            b, h, _ = index_of(inputs, inputs.everything)
            words = Words(dropped.seed, dropped.items(b), h, *positions(inputs, inputs.everything), dropped.p)
            rows, columns, threshold = words.rows.contiguous(), words.columns.contiguous(), words.threshold
            keep_factor = 1.0 / (1.0 - dropped.p)
        q, k = inputs.query, inputs.key
        q, k = q if _is_ready(q, dtype) else _copied(q, dtype), k if _is_ready(k, dtype) else _copied(k, dtype)
        tensors = (q, k, value if _is_ready(value, dtype) else _copied(value, dtype))
        capped = 0.0 if inputs.softcap is None else inputs.softcap
        options = (bias, index is not None, inputs.scale, capped, rows, columns, threshold, keep_factor)
        return cls((*tensors, plan.starts, plan.runs, plan.spans, bits, visible, *options), index, table, of_rows)


def prepared(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor as the compiled kernel reads it: in ``dtype``, with padded width, stride 1 and aligned rows."""
    return x if _is_ready(x, dtype) else _copied(x, dtype)


def _copied(x: Tensor, dtype: torch.dtype) -> Tensor:
    width = x.shape[3]
    padded = torch.empty((*x.shape[:3], _padded_width(width)), dtype=dtype, device=x.device)
    padded[..., width:] = 0
    padded[..., :width] = x
    return padded


def cost_of(inputs: AttentionInputs, value_dim: int, dropout_p: float, dtype: torch.dtype) -> Cost:
    """Return the cost of the compiled kernel's forward pass, including copies, results and packed keys.

    Tensors are copied unless they have ``dtype``, the dtype that the kernel reads.
    """
    (batch, heads, q_len, kv_len), query, key = inputs.shape, inputs.query, inputs.key
    plan, ledger, rows = known_plan(inputs), Ledger(), batch * heads * q_len
    if not plan.is_exact:
        ledger.step(held_by_bits(inputs))
    cached = ledger.now
    if inputs.bias is not None:
        ledger.step(_held_by_bias(inputs.bias, q_len + kv_len - 1))
    if dropout_p:
        ledger.step(MemoryUse(32 * max(rows, kv_len), 4 * (rows + kv_len)))
    widths, item = (_padded_width(query.shape[3]), _padded_width(value_dim)), dtype.itemsize
    is_read = query.dtype is dtype
    ledger.allocate(sum(0 if _is_ready(x, dtype) else math.prod(x.shape[:3]) * widths[0] * item for x in (query, key)))
    ledger.allocate(0 if is_read and value_dim == widths[1] else math.prod(key.shape[:3]) * widths[1] * item)
    results = rows * (widths[1] * item + 4)
    ledger.allocate(results)
    sizes = (batch, heads, key.shape[1], q_len, kv_len, *widths)
    ledger.touch(torch.ops.saccade_cpu.held(*sizes, dtype == torch.bfloat16))
    if not is_read:  # the output is rounded
        ledger.allocate(rows * value_dim * query.dtype.itemsize)
        results = rows * (value_dim * query.dtype.itemsize + 4)
    return Cost(len(plan.runs), plan.pairs(inputs), MemoryUse(ledger.most, cached + results))


def chunks_of(inputs: AttentionInputs) -> int:
    """Return the number of parts into which the compiled backward pass splits sums over rows to occupy all threads."""
    batch, _, q_len, _ = inputs.shape
    return max(1, min(-(-_TASKS // max(1, batch * inputs.key.shape[1])), -(-q_len // ROWS)))


def bytes_of_backward(inputs: AttentionInputs, value_dim: int, dtype: torch.dtype) -> int:
    """Return the peak memory of the compiled kernel's backward pass, in bytes, with gradients and ``dtype`` copies."""
    (batch, heads, q_len, kv_len), kv_heads = inputs.shape, inputs.key.shape[1]
    rows, widths = batch * heads * q_len, (_padded_width(inputs.query.shape[3]), _padded_width(value_dim))
    of_keys = 4 * batch * kv_heads * kv_len * sum(widths)
    narrow = inputs.query.dtype.itemsize
    rounded = 0 if narrow == 4 else narrow * (rows * widths[0] + batch * kv_heads * kv_len * sum(widths))
    copies = 0 if inputs.query.dtype is dtype else 4 * (rows * sum(widths)) + of_keys
    return copies + 4 * rows * (widths[0] + 1) + max((chunks_of(inputs) + 1) * of_keys, of_keys + rounded)


def _padded_width(width: int) -> int:
    """Round the width of a tensor up to a multiple of the compiled kernel's vector width."""
    return -(-max(1, width) // _LANES) * _LANES


def _is_ready(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the compiled kernel, which reads ``dtype``, can read a tensor without a copy.

    The kernel requires a padded width, stride 1 in the last axis, and aligned rows.
    """
    if x.dtype is not dtype or x.shape[3] % _LANES or not x.shape[3] or x.stride(3) != 1 or x.data_ptr() % 4:
        return False
    return dtype is torch.float32 or not any(step % 2 for step in x.stride()[:3])


def _bias_rows(bias: Term, shape: tuple[int, int, int, int]) -> tuple[Tensor | None, Tensor | None, int]:
    """Return a bias in float32 for the compiled kernel, and the values of `Call.places` and `Call.table`."""
    source = bias.source
    if isinstance(bias, DistanceTerm):
        q_len, kv_len = shape[2:]
        top = bias.first + q_len - 1
        index = torch.arange(top, min(top, bias.first - kv_len), -1, device=source.device)
        index = index.sub_(bias.lowest).clamp_(0, source.shape[3] - 1)
        return source.float().index_select(3, index), index, len(index)
    if isinstance(bias, DecayTerm):
        return bias.of_keys(), None, shape[3]
    rows = source.float()
    rows = rows if rows.stride(3) == 1 else rows.contiguous()
    return rows, None, 0 if source.shape[2] > 1 else shape[3]


def _held_by_bias(bias: Term, distances: int) -> MemoryUse:
    """Return the peak memory of `_bias_rows` and the memory of its result, in bytes."""
    source = bias.source
    if isinstance(bias, DistanceTerm):
        read = (8 + 4 * source.shape[0] * source.shape[1]) * distances
        return MemoryUse(read, read)
    if isinstance(bias, DecayTerm):
        rows = source.shape[0] * source.shape[1] * (distances + 1 - source.shape[3])
        return MemoryUse(12 * source.numel() + 8 * rows, 4 * source.numel() + 8 * rows)
    widened = 0 if source.dtype == torch.float32 else 4 * source.numel()
    straight = 0 if source.stride(3) == 1 else 4 * source.numel()
    return MemoryUse(widened + straight, straight or widened)
