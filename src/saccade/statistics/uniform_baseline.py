"""Uniform: what the statistics would be if every query shared its attention evenly among the keys that it sees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.inputs import AttentionInputs
from saccade.engine.tiles.tile_scores import allowed
from saccade.plan import Strip, Tile, Triangle
from saccade.statistics.distance import Distance
from saccade.statistics.fold import Outline
from saccade.statistics.mass import LagMass, LocalMass, SinkMass
from saccade.statistics.per_row import PerRow, Placing
from saccade.statistics.places import Places
from saccade.statistics.row_block import Block, as_slice

__all__ = ["Near", "Uniform", "even_rows_of_blocks", "even_rows_of_mask", "uniform_of_blocks", "uniform_of_mask"]

_PAIRS = 1 << 20  # pairs whose truth is asked for at a time


class Uniform(NamedTuple):
    """What every query and key would have if each query shared its attention evenly.

    Batch and heads are 1 where the mask does not tell them apart.

    Attributes:
        visible: keys that each query sees, ``[batch | 1, heads | 1, q_len]``.
        received: column sums of the even sharing, ``[batch | 1, heads | 1, kv_len]``.
        distance: mean distance of the keys that each query sees, ``[batch | 1, heads | 1, q_len]``.
        near: by name, how many of the keys that each query sees are among the first tokens, itself, the one before,
            near; ``[batch | 1, heads | 1, q_len]`` each.
    """

    visible: Tensor
    received: Tensor
    distance: Tensor
    near: dict[str, Tensor]


class Near(NamedTuple):
    """A range of lags or of first positions, under a name and in words."""

    name: str
    what: str
    least: int
    most: int
    is_lag: bool

    def fold(self, places: Places) -> PerRow:
        """The question that counts the keys in it, asked of rows that hold 1 where a key is seen."""
        if not self.is_lag:
            return SinkMass(self.most + 1, places)
        return LagMass(self.least, places) if self.least == self.most else LocalMass(self.most, places)


def uniform_of_mask(inputs: AttentionInputs, places: Places, near: tuple[Near, ...]) -> Uniform:
    """From the tiles of a plan: most of it by counting ranges, so that pairs are looked at only where a mask is unsure.

    Cost: O(pairs that the plan is unsure of) time, and nothing for the edge of a causal mask.
    """
    whole = _outline(inputs, places)
    items, own_heads = whole.shape[:2]
    sums = _Sums(whole, places, near)
    for tile in inputs.row_plan.tiles:
        own = slice(0, 1) if items == 1 else tile.batch
        unsure = sum(len(strip.keys) for strip in tile.columns if not _is_counted(strip))
        height = max(1, _PAIRS // unsure) if unsure else tile.height
        for start in range(0, tile.height, height):
            rows = tile.rows[start : start + height]
            asked = tile._replace(batch=own, heads=slice(0, own_heads), rows=rows)
            sums.add(own, asked.heads, rows, [_seen(inputs, asked, strip, start) for strip in tile.columns])
    return sums.finished()


def _outline(inputs: AttentionInputs, places: Places) -> Outline:
    """The outline of uniform attention: batch and heads are 1 where nothing tells them apart."""
    batch, heads, q_len, kv_len = inputs.shape
    # What calls functions of the user's does not know what these tell apart.
    told = (batch, heads) if inputs.rule.asks_functions else inputs.rule.shape
    items, own_heads = (min(a, b) for a, b in zip(told, (batch, heads), strict=True))
    items = batch if max(len(places.q), len(places.kv)) > 1 else items
    return Outline((items, own_heads, q_len, kv_len), inputs.compute_dtype, inputs.device)


def _is_counted(strip: Strip) -> bool:
    return strip.residual is True or isinstance(strip.residual, Triangle)


def _seen(inputs: AttentionInputs, tile: Tile, strip: Strip, start: int) -> Seen:
    """Who sees the keys of one strip, among the rows of a tile from its place ``start`` on."""
    places = torch.arange(start, start + tile.height, device=inputs.device)
    if strip.residual is True:
        return Seen(strip.keys, torch.full_like(places, len(strip.keys)), None)
    if isinstance(strip.residual, Triangle):
        return Seen(strip.keys, (places + strip.residual.offset + 1).clamp(0, len(strip.keys)), None)
    return Seen(strip.keys, None, allowed(inputs, tile._replace(columns=(strip,))))


def uniform_of_blocks(outline: Outline, blocks: Iterable[Block], places: Places, near: tuple[Near, ...]) -> Uniform:
    """From the weights themselves, where nothing is known of a mask: a key is seen if its weight is not 0."""
    sums = _Sums(outline, places, near)
    for block in blocks:
        seen = [Seen(span, None, weights != 0) for span, weights in block.by_range(block.weights)]
        sums.add(block.batch, block.heads, block.rows, seen)
    return sums.finished()


def even_rows_of_mask(inputs: AttentionInputs, places: Places, fold: PerRow) -> Tensor:
    """A question asked of the rows of uniform attention, ``[batch | 1, heads | 1, q_len, ...]``.

    Cost: O(pairs in the plan) time, a million pairs at a time.
    """
    whole = _outline(inputs, places)
    items, own_heads, state = *whole.shape[:2], fold.start(whole)
    for tile in inputs.row_plan.tiles:
        own = slice(0, 1) if items == 1 else tile.batch
        keys = tuple(strip.keys for strip in tile.columns)
        columns = sum(map(len, keys))
        height = max(1, _PAIRS // max(1, columns * (own.stop - own.start) * own_heads))
        for start in range(0, tile.height if columns else 0, height):
            asked = tile._replace(batch=own, heads=slice(0, own_heads), rows=tile.rows[start : start + height])
            shape = (own.stop - own.start, own_heads, asked.height, columns)
            seen = allowed(inputs, asked)
            if seen is None:
                seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=inputs.device)
            fold.add(state, _even(Block(own, asked.heads, asked.rows, keys, seen.expand(shape).to(whole.dtype))))
    return fold.finish(state)


def even_rows_of_blocks(outline: Outline, blocks: Iterable[Block], fold: PerRow) -> Tensor:
    """The same where nothing is known of a mask: a key is seen if its weight is not 0."""
    state = fold.start(outline)
    for block in blocks:
        fold.add(state, _even(Block(*block[:4], (block.weights != 0).to(outline.dtype))))
    return fold.finish(state)


def _even(block: Block) -> Block:
    """Rows of 1 where a key is seen, as rows that share evenly."""
    return Block(*block[:4], block.weights / block.weights.sum(-1, keepdim=True).clamp_min(1.0))


class Seen(NamedTuple):
    """Who sees a range of keys.

    Attributes:
        keys: the range.
        first: how many of them, the first ones, each row sees, int64 ``[rows]``; or None.
        allowed: else who sees whom, ``[batch, heads, rows, keys]``.
    """

    keys: range
    first: Tensor | None
    allowed: Tensor | None


class _Sums:
    """Sums over complete rows, which may come in any order."""

    def __init__(self, outline: Outline, places: Places, near: tuple[Near, ...]):
        batch, heads, q_len, kv_len = outline.shape
        self.outline, self.near = outline, near
        self.placing = Placing(places, places.first)
        self.folds = [one.fold(places) for one in near]

        def zeros(length: int) -> Tensor:
            return torch.zeros(batch, heads, length, dtype=outline.sum_dtype, device=outline.device)

        self.visible, self.received, self.far = zeros(q_len), zeros(kv_len), zeros(q_len)
        self.counts = {one.name: zeros(q_len) for one in near}

    def add(self, batch: slice, heads: slice, rows: range, seen: Sequence[Seen]) -> None:
        own, wide = (batch, heads, as_slice(rows)), self.visible.dtype
        blocks: list[Block] = []
        counted: list[tuple[range, Tensor]] = []
        for one in seen:
            if one.first is not None and self.placing.first is not None:
                self._count(own, rows, one.keys, one.first)
                counted.append((one.keys, one.first))
                continue
            allowed = one.allowed
            if allowed is None:
                assert one.first is not None
                allowed = torch.arange(len(one.keys), device=one.first.device) < one.first[:, None]
            allowed = allowed.expand(*self.visible[own].shape, len(one.keys)).to(wide)
            block = Block(batch, heads, rows, (one.keys,), allowed)
            blocks.append(block)
            self.visible[own] += allowed.sum(-1)
            self.far[own] += Distance().of_rows(block, self.placing)
            for near, fold in zip(self.near, self.folds, strict=True):
                self.counts[near.name][own] += fold.of_rows(block, self.placing)
        share = 1.0 / self.visible[own].clamp_min(1.0)
        for block in blocks:
            self.received[batch, heads, as_slice(block.columns[0])] += (share[..., None, :] @ block.weights)[..., 0, :]
        for keys, first in counted:
            # Key c gets the shares of all rows that see more than c keys: sums from the end.
            at = share.new_zeros(*share.shape[:2], len(keys) + 1).index_add_(-1, first, share)
            self.received[batch, heads, as_slice(keys)] += at.flip(-1).cumsum(-1).flip(-1)[..., 1:]

    def _count(self, own: tuple[slice, slice, slice], rows: range, keys: range, first: Tensor) -> None:
        """Where all positions follow one by one and each row sees the first keys of a range: by arithmetic alone."""
        device, step = first.device, keys.step
        assert self.placing.first is not None
        q_first, kv_first = self.placing.first
        # Rows where keys are counted: key places, times step.
        q = torch.arange(rows.start, rows.stop, rows.step, device=device) + q_first - kv_first - keys.start

        def below(key: Tensor) -> Tensor:
            """How many of the keys that a row sees stand before a place."""
            return torch.minimum(((key + step - 1) // step).clamp_min(0), first)

        self.visible[own] += first
        before = below(q)
        # Keys stand at 0, step, 2 · step, …: sums of the first m are step · m (m - 1) / 2.
        left = q * before - step * before * (before - 1) // 2
        right = step * (first * (first - 1) - before * (before - 1)) // 2 - q * (first - before)
        self.far[own] += left + right
        zero = -kv_first - keys.start  # the place of position 0
        for near in self.near:
            if near.is_lag:
                least, stop = q - near.most, q - near.least + 1
            else:
                least, stop = (torch.full_like(q, zero + end) for end in (near.least, near.most + 1))
            self.counts[near.name][own] += below(stop) - below(least)

    def finished(self) -> Uniform:
        dtype = self.outline.dtype
        distance = self.far / self.visible.clamp_min(1.0)
        near = {name: count.to(dtype) for name, count in self.counts.items()}
        return Uniform(self.visible.to(dtype), self.received.to(dtype), distance.to(dtype), near)
