"""The blocks of rows that the tiled kernel processes, and the cost of its passes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple

from torch import Tensor

from saccade.engine.inputs import AttentionInputs
from saccade.engine.memory_accounting import Cost, Ledger, MemoryUse, Probe, bytes_widened
from saccade.engine.tiles.grouped_heads import groups_of
from saccade.engine.tiles.index_ranges import at, joined, take
from saccade.engine.tiles.tile_scores import ROOM_FOR_HIDDEN, caches_hidden, compared, hidden, key_of_hidden, modified
from saccade.engine.tiles.tile_splitting import Cut, cut, few_rows
from saccade.plan import Tile

_ROWS = 128
_ENTRIES = 1 << 20  # scores of a block: 4 MB in float32, four heads of 128 rows at 2,048 keys
_NARROW = 2048  # keys


class Blocks(NamedTuple):
    """A tile, and how the tiled kernel splits it into blocks."""

    tile: Tile
    cut: Cut

    def rows(self) -> Iterator[Tile]:
        """Yield the blocks in the order of their rows, each for all batch items and heads of the tile."""
        for start, stop in self.cut.rows:
            piece = few_rows(self.tile, start, stop)
            if piece.width:  # the first rows of a triangle may be empty
                yield piece

    @property
    def pairs(self) -> int:
        """Number of query-key pairs in a tile's blocks."""
        items, heads = (span.stop - span.start for span in (self.tile.batch, self.tile.heads))
        return items * heads * sum(piece.height * piece.width for piece in self.rows())


def cuts_of(inputs: AttentionInputs) -> Iterator[Blocks]:
    """Yield all non-empty tiles, each with its split into blocks of the tiled kernel."""
    share = inputs.shape[1] // inputs.key.shape[1] if inputs.key.shape[1] else 1
    for tile in inputs.row_plan.tiles:
        if tile.width:
            # Process twice as many long rows at a time: larger products are faster, and caches are exceeded anyway.
            times = 1 if tile.width <= _NARROW else 2
            yield Blocks(tile, cut(tile, share=share, rows=times * _ROWS, entries=times * _ENTRIES))


def blocks_of(inputs: AttentionInputs) -> Iterator[Tile]:
    """Yield the blocks of rows that the tiled kernel processes."""
    for blocks in cuts_of(inputs):
        for batch in blocks.cut.batch:
            for heads in blocks.cut.heads:
                for piece in blocks.rows():
                    yield piece._replace(batch=batch, heads=heads)


def pairs_of(inputs: AttentionInputs) -> int:
    """Return the number of query-key pairs in the tiled kernel's blocks, summed over batch and heads."""
    return sum(blocks.pairs for blocks in cuts_of(inputs))


def cost_of(inputs: AttentionInputs, value_dim: int, dropout_p: float) -> Cost:
    """Return the cost of the tiled kernel's forward pass."""
    run = _SimulatedRun(inputs, value_dim, has_dropout=dropout_p > 0.0)
    run.start()
    for blocks in cuts_of(inputs):
        # The first slices of batch items and heads are the largest. The others need as much memory or less.
        for piece in blocks.rows():
            run.block(piece._replace(batch=blocks.cut.batch[0], heads=blocks.cut.heads[0]))
    run.ledger.free(sum(run.buffers.values()))
    return Cost(len(inputs.row_plan), pairs_of(inputs), MemoryUse(run.ledger.most, run.ledger.now))


def bytes_of_backward(inputs: AttentionInputs, value_dim: int) -> int:
    """Return the peak memory of the tiled kernel's backward pass, in bytes, including gradients."""
    (batch, heads, q_len, kv_len), item, wide = inputs.shape, inputs.query.dtype.itemsize, inputs.compute_dtype.itemsize
    widths = inputs.query.shape[3] + value_dim
    of_query = batch * heads * q_len * inputs.query.shape[3]
    of_keys = batch * inputs.key.shape[1] * kv_len * widths
    rows, most = batch * heads * q_len, 0
    for blocks in cuts_of(inputs):
        items, num_heads = (span.stop - span.start for span in (blocks.cut.batch[0], blocks.cut.heads[0]))
        for piece in blocks.rows():
            columns = items * len(range(*groups_of(blocks.cut.heads[0], heads, inputs.key.shape[1]).indices(heads)))
            is_copied = item < wide or len(joined(piece.spans)) > 1
            entries, sides = items * num_heads * piece.height, columns * piece.width * widths
            extra = (
                _num_score_blocks(inputs) * entries * piece.width + entries * widths + (2 if is_copied else 1) * sides
            )
            extra += _numbers_of_score_function(inputs, entries * piece.width)
            most = max(most, extra)
    rounded = 0 if item == wide else (of_query + of_keys) * item
    row_products = rows * value_dim * wide  # grad_out * out, before it is summed over each row
    return (of_query + of_keys) * wide + max(most * wide, rounded, row_products) + 2 * rows * wide


def _num_score_blocks(inputs: AttentionInputs) -> int:
    """Return how many blocks of scores the tiled backward pass stores at once, including those for score functions."""
    return 2 + (inputs.softcap is not None) + 2 * (inputs.modification is not None)


def _numbers_of_score_function(inputs: AttentionInputs, pairs: int) -> int:
    """Return how many elements the backward pass stores for a score's tile function; 0 for dot products."""
    if inputs.tile_function is None:
        return 0
    held_bytes = getattr(inputs.tile_function, "held_bytes", None)
    # The result of the score function, and the product with a gradient.
    return pairs + (2 * pairs if held_bytes is None else 2 * held_bytes(1))


class _SimulatedRun:
    """A simulated run of the tiled kernel that accounts for the memory of each block."""

    def __init__(self, inputs: AttentionInputs, value_dim: int, *, has_dropout: bool):
        self.ledger = Ledger()
        self._inputs, self._value_dim, self._has_dropout = inputs, value_dim, has_dropout
        self._item, self._wide = inputs.query.dtype.itemsize, inputs.compute_dtype.itemsize
        self._probe = Probe(inputs)
        self._cached: set[Hashable] = set()
        self._room = ROOM_FOR_HIDDEN
        self.buffers = {0: 0, 3: 0}

    def start(self) -> None:
        """Account for results, the dropout words of rows and columns, and the test for large scores."""
        (batch, heads, q_len, kv_len), inputs = self._inputs.shape, self._inputs
        rows = batch * heads * q_len
        self.ledger.allocate(rows * (self._value_dim * self._item + self._wide))
        if self._has_dropout:
            self.ledger.touch(32 * max(rows, kv_len))  # four 64-bit numbers exist while one 32-bit word is computed
            self.ledger.allocate(4 * (rows + kv_len))
        if inputs.is_plain:
            entries = max(rows * inputs.query.shape[3], inputs.key.numel())
            self.ledger.touch(bytes_widened(entries, inputs.query.dtype))

    def block(self, piece: Tile) -> None:
        """Account for the memory of one block of the tiled kernel."""
        inputs, ledger, wide = self._inputs, self.ledger, self._wide
        items, heads = (span.stop - span.start for span in (piece.batch, piece.heads))
        groups = groups_of(piece.heads, inputs.shape[1], inputs.key.shape[1])
        query = items * heads * piece.height * inputs.query.shape[3] * wide
        entries = items * heads * piece.height * piece.width
        widths = (inputs.key.shape[3], self._value_dim)
        columns = items * (groups.stop - groups.start) * piece.width
        is_half, is_gathered = self._item < wide, len(joined(piece.spans)) > 1
        copied = sum(columns * width * wide for width in widths) if is_half or is_gathered else 0
        if is_half and is_gathered:
            ledger.touch(copied + columns * max(widths) * self._item)
        with ledger.holding(copied + (query if is_half else 0)):
            if inputs.tile_function is None:
                with ledger.holding(query):
                    self._buffer(0, entries * wide)
                    if not is_gathered and not is_half and not _is_one_axis(inputs.key, items):
                        ledger.touch(columns * widths[0] * wide)
                scores = 0
            else:
                scores = entries * wide
                ledger.touch(self._compared(piece, scores))
            with ledger.holding(scores):
                if inputs.modification is not None:
                    changed = self._probe.held("modified", piece, _modified).most
                    ledger.touch(max(changed, 0))
                if inputs.bias is not None:
                    ledger.touch(self._probe.held("bias", piece, _read_bias).most)
                for strip in piece.columns:
                    if strip.partial is not True:
                        self._hide(piece._replace(columns=(strip,)))
                if self._has_dropout:
                    self._buffer(3, entries * 4)
                ledger.touch(2 * items * heads * piece.height * self._value_dim * wide)

    def _compared(self, piece: Tile, size: int) -> int:
        """Return the bytes that a score's tile function allocates for a block, including a scaled copy of results."""
        held_bytes = getattr(self._inputs.tile_function, "held_bytes", None)
        if held_bytes is None:
            return max(size, self._probe.held("compared", piece, _compared).most)
        return max(2 * size, size + held_bytes(self._wide))

    def _hide(self, piece: Tile) -> None:
        """Account for masking the pairs of one column range. Cached masks stay on the ledger."""
        key = key_of_hidden(self._inputs, piece)
        if key in self._cached:
            return
        held = self._probe.held("hidden", piece, hidden)
        self.ledger.touch(held.most)
        if caches_hidden(self._inputs) and held.left <= self._room:
            self._room -= held.left
            self._cached.add(key)
            self.ledger.allocate(held.left)

    def _buffer(self, number: int, size: int) -> None:
        if size > self.buffers[number]:
            self.ledger.free(self.buffers[number])
            self.ledger.allocate(size)
            self.buffers[number] = size


def _is_one_axis(x: Tensor, items: int) -> bool:
    """Return whether the batch and head axes of keys merge without a copy. If not, matrix products copy the keys."""
    return items == 1 or x.shape[1] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def _compared(inputs: AttentionInputs, tile: Tile) -> Tensor:
    groups = groups_of(tile.heads, inputs.shape[1], inputs.key.shape[1])
    q = at(inputs.query[tile.batch, tile.heads], tile.rows, 2)
    k = take(inputs.key[tile.batch, groups], tile.spans, 2)
    return compared(inputs, q.to(inputs.compute_dtype), k.to(inputs.compute_dtype))


def _modified(inputs: AttentionInputs, tile: Tile) -> Tensor:
    items, heads = (span.stop - span.start for span in (tile.batch, tile.heads))
    scores = inputs.key.new_zeros((), dtype=inputs.compute_dtype).expand(items, heads, tile.height, tile.width)
    return modified(inputs, scores, tile)


def _read_bias(inputs: AttentionInputs, tile: Tile) -> Tensor:
    assert inputs.bias is not None
    return inputs.bias.read(tile).to(inputs.compute_dtype)
