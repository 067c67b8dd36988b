"""Time, memory and pairs of the fused kernel, computed without running it."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels import aten_flash
from saccade.engine.kernels.additive_masks import Added, fits_into_cache, hidden_key, hidden_terms, with_bias
from saccade.engine.kernels.fused_calls import Call, calls_of, single_call, tiles_of
from saccade.engine.kernels.fused_threads import threads_for
from saccade.engine.memory_accounting import Cost, Ledger, MemoryUse, Probe
from saccade.engine.tiles.grouped_heads import groups_of
from saccade.plan import Plan, Tile
from saccade.plan.layout import TILE_COST


def pairs_of(inputs: AttentionInputs) -> int:
    """Return the number of query-key pairs whose scores the fused kernel computes, over batch and heads."""
    single = single_call(inputs)
    if single is not None:
        return single.pairs
    return sum(call.pairs for tile in tiles_of(inputs) for call in calls_of(inputs, tile))


def time_of_plan(plan: Plan, pair: float) -> float:
    """Estimate the fused kernel's time for a plan, in units of the time for one query-key pair.

    Args:
        plan: the plan.
        pair: the time for one pair of this plan, in the same units.
    """
    return pair * plan.pairs + TILE_COST * len(plan)


def cost_of(inputs: AttentionInputs, value_dim: int) -> Cost:
    """Return the cost of the fused kernel's forward pass."""
    batch, heads, q_len, _ = inputs.shape
    copies, width = _bytes_of_copies(inputs, value_dim)
    rows, single = batch * heads * q_len, single_call(inputs)
    run = _SimulatedRun(inputs, width, threads_for(inputs) if single is None else 1)
    run.ledger.touch(copies.most)
    with run.ledger.holding(copies.left):
        if single is not None:
            run.ledger.allocate(run.call(single))
        else:
            run.ledger.allocate(rows * (width * inputs.query.dtype.itemsize + inputs.compute_dtype.itemsize))
            for tile in tiles_of(inputs):
                for call in calls_of(inputs, tile):
                    run.call(call)
    return Cost(len(inputs.plan), pairs_of(inputs), MemoryUse(run.ledger.most, run.ledger.now))


def bytes_of_backward(inputs: AttentionInputs, value_dim: int) -> int:
    """Return the peak memory of the fused kernel's backward pass, in bytes, including gradients."""
    (batch, heads, q_len, kv_len), key, single = inputs.shape, inputs.key, single_call(inputs)
    width, item, wide = (
        max(inputs.query.shape[3], value_dim),
        inputs.query.dtype.itemsize,
        inputs.compute_dtype.itemsize,
    )
    rows, columns = batch * heads * q_len * width, batch * key.shape[1] * kv_len * width
    if single is not None and single.tile.width == kv_len:
        height, width = single.tile.height, single.tile.width
        return (2 * rows + 2 * columns) * item + torch.get_num_threads() * aten_flash.bytes_of_backward(
            height, width, item
        )
    threads, most = threads_for(inputs), 0
    for tile in tiles_of(inputs):
        for call in calls_of(inputs, tile):
            groups = groups_of(tile.heads, heads, key.shape[1])
            items = tile.batch.stop - tile.batch.start
            entries_of_rows = items * (tile.heads.stop - tile.heads.start) * tile.height * width
            entries_of_keys = items * (groups.stop - groups.start) * tile.width * width
            copied = 2 * entries_of_keys * item if len(call.columns) > 1 else 0
            buffers = (1 if threads > 1 else torch.get_num_threads()) * aten_flash.bytes_of_backward(
                tile.height, tile.width, item
            )
            most = max(most, copied + (2 * entries_of_rows + 2 * entries_of_keys) * item + buffers)
    rounded = 0 if item == wide else 2 * columns * item
    return rows * item + 2 * columns * wide + max(threads * most, rounded)


def _bytes_of_copies(inputs: AttentionInputs, value_dim: int) -> tuple[MemoryUse, int]:
    """Return the memory for the fused kernel's copies of query, key and value, and the width of the copies."""
    (batch, heads, q_len, _), query, key = inputs.shape, inputs.query, inputs.key
    is_straight = query.stride(3) == key.stride(3) == 1
    if query.shape[3] == value_dim and inputs.scale > 0.0 and is_straight:
        return MemoryUse(0, 0), value_dim
    width = max(value_dim, query.shape[3], 1)
    of_query, of_key = (size * width * query.dtype.itemsize for size in (batch * heads * q_len, key[..., 0].numel()))
    copied = sum(size for x, size in ((query, of_query), (key, of_key)) if x.shape[3] != width or x.stride(3) != 1) + (
        of_key if value_dim != width else 0
    )
    if inputs.scale > 0.0:
        return MemoryUse(copied, copied), width
    is_copied = query.shape[3] != width or query.stride(3) != 1
    return MemoryUse(copied + of_query, copied + (0 if is_copied else of_query)), width


class _SimulatedRun:
    """A simulated run of the fused kernel that accounts for the memory of each call.

    Attributes:
        ledger: memory of all threads: results, caches, and one call in progress per thread.
    """

    def __init__(self, inputs: AttentionInputs, width: int, threads: int):
        self.ledger = Ledger()
        self._inputs, self._width, self._threads = inputs, width, threads
        self._probe = Probe(inputs)
        self._cached: dict[Hashable, tuple[int, int]] = {}
        self._entries = 0
        self._ledger_of_call = Ledger()  # memory of one call

    def call(self, call: Call) -> int:
        """Account for the temporary memory of one call to torch's flash operation. Return the bytes of its results."""
        inputs, tile, ledger = self._inputs, call.tile, Ledger()
        self._ledger_of_call = ledger
        items, heads = (span.stop - span.start for span in (tile.batch, tile.heads))
        groups = groups_of(tile.heads, inputs.shape[1], inputs.key.shape[1])
        kv_heads, columns, item = groups.stop - groups.start, call.columns, inputs.query.dtype.itemsize
        copies = 2 * items * kv_heads * tile.width * self._width * item if len(columns) > 1 else 0
        terms, num_distinct = self._added(call)
        with ledger.holding(terms + copies):
            shape = (items, heads, tile.height, self._width)
            of_torch = torch.get_num_threads() if self._threads == 1 else 1
            held = aten_flash.held(shape, kv_heads, tile.width, inputs.query.dtype, call.causal, num_distinct, of_torch)
            ledger.touch(held.most)
        if inputs.plan.overlaps or not call.is_first:
            # Half precision is merged in float32: both operands and the result are copied.
            rows, wide = items * heads * tile.height, inputs.compute_dtype.itemsize
            ledger.touch(held.left + rows * (self._width * wide * (1 if item == wide else 3) + 3 * wide))
        self.ledger.touch(self._threads * ledger.most)
        return held.left

    def _added(self, call: Call) -> tuple[int, tuple[int, int] | None]:
        """Account for a call's additive mask or bias. Return its bytes, and how many batch items and heads it has."""
        hidden, num_distinct = (0, None) if call.causal else self._hidden(call)
        bias = self._inputs.bias
        if bias is None:
            return hidden, num_distinct

        def read(inputs: AttentionInputs, piece: Tile) -> Added:
            likewise = (
                None if num_distinct is None else torch.zeros(()).expand(*num_distinct, piece.height, piece.width)
            )
            return with_bias(inputs, piece, likewise)

        with self._ledger_of_call.holding(hidden):
            held = self._probe.held("bias", call.tile, read)
            self._ledger_of_call.touch(held.most)
        sizes = num_distinct or (1, 1)
        return held.left, (max(sizes[0], bias.source.shape[0]), max(sizes[1], bias.source.shape[1]))

    def _hidden(self, call: Call) -> tuple[int, tuple[int, int] | None]:
        """Account for a call's additive mask without a bias, like `_added`. Cached masks stay on the ledger."""
        inputs, tile = self._inputs, call.tile
        if all(strip.partial is True for strip in tile.columns):
            return 0, None
        key = hidden_key(inputs, call.tile)
        if key in self._cached:
            return 0, self._cached[key]
        making = self._probe.held("hidden", tile, hidden_terms)
        self.ledger.touch(self._threads * making.most)
        entries = making.left // inputs.query.dtype.itemsize
        items, heads = (span.stop - span.start for span in (tile.batch, tile.heads))
        num_distinct = _num_distinct(entries // (tile.height * tile.width), items, heads, inputs.rule.shape[1])
        if inputs.rule.is_value and fits_into_cache(entries, self._entries):
            self._entries += entries
            self._cached[key] = num_distinct
            self.ledger.allocate(making.left)
            return 0, num_distinct
        return making.left, num_distinct


def _num_distinct(copies: int, items: int, heads: int, own_heads: int) -> tuple[int, int]:
    """Return the batch and head sizes of an additive mask of ``copies`` matrices that the fused kernel would read."""
    apart = heads if own_heads > 1 or copies > items else 1
    return max(1, copies // apart), apart
