"""Uniform baseline: statistics of attention where each query spreads its weight evenly over its visible keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.inputs import AttentionInputs
from saccade.engine.tiles.tile_scores import allowed
from saccade.plan import ColumnRange, Tile, Triangle
from saccade.statistics.distance import Distance
from saccade.statistics.mass import LagMass, LocalMass, SinkMass
from saccade.statistics.per_row import CheckedPair, PerRow, lead_of
from saccade.statistics.row_block import Block, as_slice
from saccade.statistics.statistic import MatrixInfo

_PAIRS = 1 << 20  # maximum number of pairs for which a mask is evaluated at a time


class Uniform(NamedTuple):
    """The uniform baseline: statistics of queries and keys under uniform attention.

    The sizes of batch and heads are 1 if the mask is the same for all batch items or heads.

    Attributes:
        visible: number of visible keys of each query, ``[batch | 1, heads | 1, q_len]``.
        received: column sums of uniform attention, ``[batch | 1, heads | 1, kv_len]``.
        distance: mean distance from each query to its visible keys, ``[batch | 1, heads | 1, q_len]``.
        near: by name of a `Near` range, the number of each query's visible keys in the range,
            ``[batch | 1, heads | 1, q_len]``.
    """

    visible: Tensor
    received: Tensor
    distance: Tensor
    near: dict[str, Tensor]


class Near(NamedTuple):
    """A named range of lags or initial positions, in which the uniform baseline counts visible keys."""

    name: str
    what: str
    least: int
    most: int
    is_lag: bool

    def statistic(self, positions: CheckedPair) -> PerRow:
        """Return the statistic that sums each row over the range; on a 0/1 mask, it counts the visible keys."""
        if not self.is_lag:
            return SinkMass(self.most + 1, positions)
        return LagMass(self.least, positions) if self.least == self.most else LocalMass(self.most, positions)


def uniform_of_mask(inputs: AttentionInputs, positions: CheckedPair, near: tuple[Near, ...]) -> Uniform:
    """Compute the uniform baseline from a mask's plan: in closed form for full tiles, pair by pair for partial tiles.

    Cost: O(pairs in partial tiles) time; the diagonal tiles of a causal mask also have a closed form.
    """
    whole = _uniform_info(inputs, positions)
    items, num_heads = whole.shape[:2]
    sums = _Sums(whole, positions, near)
    for tile in inputs.row_plan.tiles:
        batch = slice(0, 1) if items == 1 else tile.batch
        partial = sum(len(strip.keys) for strip in tile.columns if not _has_closed_form(strip))
        height = max(1, _PAIRS // partial) if partial else tile.height
        for start in range(0, tile.height, height):
            rows = tile.rows[start : start + height]
            part = tile._replace(batch=batch, heads=slice(0, num_heads), rows=rows)
            sums.add(batch, part.heads, rows, [_visible_keys(inputs, part, strip, start) for strip in tile.columns])
    return sums.finished()


def _uniform_info(inputs: AttentionInputs, positions: CheckedPair) -> MatrixInfo:
    """Return the `MatrixInfo` of uniform attention; batch and heads have size 1 if the mask is the same for all."""
    batch, heads, q_len, kv_len = inputs.shape
    # A user's function may depend on the batch item and head even if the shape of its mask does not show it.
    shape = (batch, heads) if inputs.rule.calls_functions else inputs.rule.shape
    items, num_heads = (min(a, b) for a, b in zip(shape, (batch, heads), strict=True))
    items = batch if max(x.items for x in positions) > 1 else items
    return MatrixInfo((items, num_heads, q_len, kv_len), inputs.compute_dtype, inputs.device)


def _has_closed_form(strip: ColumnRange) -> bool:
    return strip.partial is True or isinstance(strip.partial, Triangle)


def _visible_keys(inputs: AttentionInputs, tile: Tile, strip: ColumnRange, start: int) -> VisibleKeys:
    """Return which keys in a column range each row of a tile sees; the tile's first row has index ``start``."""
    rows = torch.arange(start, start + tile.height, device=inputs.device)
    if strip.partial is True:
        return VisibleKeys(strip.keys, torch.full_like(rows, len(strip.keys)), None)
    if isinstance(strip.partial, Triangle):
        return VisibleKeys(strip.keys, (rows + strip.partial.offset + 1).clamp(0, len(strip.keys)), None)
    return VisibleKeys(strip.keys, None, allowed(inputs, tile._replace(columns=(strip,))))


def uniform_of_blocks(
    info: MatrixInfo, blocks: Iterable[Block], positions: CheckedPair, near: tuple[Near, ...]
) -> Uniform:
    """Compute the uniform baseline from weights instead of a mask: a key is visible if its weight is not 0."""
    sums = _Sums(info, positions, near)
    for block in blocks:
        seen = [VisibleKeys(span, None, weights != 0) for span, weights in block.by_range(block.weights)]
        sums.add(block.batch, block.heads, block.rows, seen)
    return sums.finished()


def uniform_rows_of_mask(inputs: AttentionInputs, positions: CheckedPair, statistic: PerRow) -> Tensor:
    """Compute a row statistic of uniform attention under a mask, ``[batch | 1, heads | 1, q_len, ...]``.

    Cost: O(pairs in the plan) time, a million pairs at a time.
    """
    whole = _uniform_info(inputs, positions)
    items, num_heads, state = *whole.shape[:2], statistic.start(whole)
    for tile in inputs.row_plan.tiles:
        batch = slice(0, 1) if items == 1 else tile.batch
        keys = tuple(strip.keys for strip in tile.columns)
        columns = sum(map(len, keys))
        height = max(1, _PAIRS // max(1, columns * (batch.stop - batch.start) * num_heads))
        for start in range(0, tile.height if columns else 0, height):
            part = tile._replace(batch=batch, heads=slice(0, num_heads), rows=tile.rows[start : start + height])
            shape = (batch.stop - batch.start, num_heads, part.height, columns)
            seen = allowed(inputs, part)
            if seen is None:
                seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=inputs.device)
            statistic.add(
                state, _uniform_rows(Block(batch, part.heads, part.rows, keys, seen.expand(shape).to(whole.dtype)))
            )
    return statistic.finish(state)


def uniform_rows_of_blocks(info: MatrixInfo, blocks: Iterable[Block], statistic: PerRow) -> Tensor:
    """Compute a row statistic of uniform attention from weights: a key is visible if its weight is not 0."""
    state = statistic.start(info)
    for block in blocks:
        statistic.add(state, _uniform_rows(Block(*block[:4], (block.weights != 0).to(info.dtype))))
    return statistic.finish(state)


def _uniform_rows(block: Block) -> Block:
    """Convert a block of ones at visible keys to uniform attention: divide each row by its sum."""
    return Block(*block[:4], block.weights / block.weights.sum(-1, keepdim=True).clamp_min(1.0))


class VisibleKeys(NamedTuple):
    """The keys of a range that each row of a block sees, for the uniform baseline.

    Attributes:
        keys: the range of keys.
        first: if each row sees only the first keys of the range, their number, int64 ``[rows]``; None otherwise.
        allowed: if `first` is None, whether each row sees each key, ``[batch, heads, rows, keys]``.
    """

    keys: range
    first: Tensor | None
    allowed: Tensor | None


class _Sums:
    """Accumulator for the sums of the uniform baseline. Rows may be added in any order."""

    def __init__(self, info: MatrixInfo, positions: CheckedPair, near: tuple[Near, ...]):
        batch, heads, q_len, kv_len = info.shape
        self.info, self.near, self.positions = info, near, positions
        self.statistics = [part.statistic(positions) for part in near]

        def zeros(length: int) -> Tensor:
            return torch.zeros(batch, heads, length, dtype=info.sum_dtype, device=info.device)

        self.visible, self.received, self.far = zeros(q_len), zeros(kv_len), zeros(q_len)
        self.counts = {part.name: zeros(q_len) for part in near}

    def add(self, batch: slice, heads: slice, rows: range, visible: Sequence[VisibleKeys]) -> None:
        index, wide = (batch, heads, as_slice(rows)), self.visible.dtype
        blocks: list[Block] = []
        counted: list[tuple[range, Tensor]] = []
        for part in visible:
            if part.first is not None and lead_of(*self.positions) is not None:
                self._count(index, rows, part.keys, part.first)
                counted.append((part.keys, part.first))
                continue
            allowed = part.allowed
            if allowed is None:
                assert part.first is not None
                allowed = torch.arange(len(part.keys), device=part.first.device) < part.first[:, None]
            allowed = allowed.expand(*self.visible[index].shape, len(part.keys)).to(wide)
            block = Block(batch, heads, rows, (part.keys,), allowed)
            blocks.append(block)
            self.visible[index] += allowed.sum(-1)
            self.far[index] += Distance().of_rows(block, *self.positions)
            for near, statistic in zip(self.near, self.statistics, strict=True):
                self.counts[near.name][index] += statistic.of_rows(block, *self.positions)
        share = 1.0 / self.visible[index].clamp_min(1.0)
        for block in blocks:
            self.received[batch, heads, as_slice(block.columns[0])] += (share[..., None, :] @ block.weights)[..., 0, :]
        for keys, first in counted:
            # Key c receives the shares of all rows that see more than c keys, so accumulate from the end.
            at = share.new_zeros(*share.shape[:2], len(keys) + 1).index_add_(-1, first, share)
            self.received[batch, heads, as_slice(keys)] += at.flip(-1).cumsum(-1).flip(-1)[..., 1:]

    def _count(self, index: tuple[slice, slice, slice], rows: range, keys: range, first: Tensor) -> None:
        """Add rows that see a prefix of a key range to the sums, in closed form. Positions must be consecutive."""
        device, step, kv_first, lead = first.device, keys.step, self.positions[1].first, lead_of(*self.positions)
        assert lead is not None
        assert kv_first is not None
        # The index of each row's own position, relative to the start of the range.
        q = torch.arange(rows.start, rows.stop, rows.step, device=device) + lead - keys.start

        def below(key: Tensor) -> Tensor:
            """Return the number of each row's visible keys before an index."""
            return torch.minimum(((key + step - 1) // step).clamp_min(0), first)

        self.visible[index] += first
        before = below(q)
        # Keys are at 0, step, 2 · step, …: the sum of the first m is step · m (m - 1) / 2.
        left = q * before - step * before * (before - 1) // 2
        right = step * (first * (first - 1) - before * (before - 1)) // 2 - q * (first - before)
        self.far[index] += left + right
        zero = -kv_first - keys.start  # the index of position 0
        for near in self.near:
            if near.is_lag:
                least, stop = q - near.most, q - near.least + 1
            else:
                least, stop = (torch.full_like(q, zero + end) for end in (near.least, near.most + 1))
            self.counts[near.name][index] += below(stop) - below(least)

    def finished(self) -> Uniform:
        dtype = self.info.dtype
        distance = self.far / self.visible.clamp_min(1.0)
        near = {name: count.to(dtype) for name, count in self.counts.items()}
        return Uniform(self.visible.to(dtype), self.received.to(dtype), distance.to(dtype), near)
