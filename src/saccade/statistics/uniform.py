"""Uniform: what the statistics would be if every query shared its attention evenly among the keys that it sees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.plan import Strip, Tile, Triangle
from saccade.score_matrix import ScoreMatrix
from saccade.statistics.block import Block, as_slice
from saccade.statistics.fold import Outline
from saccade.statistics.places import Places

__all__ = ["Near", "Uniform", "uniform_of_blocks", "uniform_of_scores"]


_TALLEST = 512  # rows of a triangle that are counted at a time
_PAIRS = 1 << 20  # pairs whose truth is asked for at a time


class Uniform(NamedTuple):
    """The even sharing of a matrix's mask: what to compare with.

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
    """A range of lags or of first positions, under a name."""

    name: str
    least: int
    most: int
    is_lag: bool


def uniform_of_scores(scores: ScoreMatrix, places: Places, near: tuple[Near, ...]) -> Uniform:
    """From the tiles of a plan: most of it by counting ranges, so that pairs are looked at only where a mask is unsure.

    Cost: O(pairs that the plan is unsure of) time; for a causal mask that is O(q_len · 768).
    """
    batch, heads, q_len, kv_len = scores.shape
    # What calls functions of the user's does not know what these tell apart.
    told = (batch, heads) if scores.rule.asks_functions else scores.rule.shape
    items, own_heads = (min(a, b) for a, b in zip(told, (batch, heads), strict=True))
    items = batch if max(len(places.q), len(places.kv)) > 1 else items
    whole = Outline((items, own_heads, q_len, kv_len), scores.compute_dtype, scores.device)
    sums = _Sums(whole, places, near)
    for tile in scores.row_plan.tiles:
        own = slice(0, 1) if items == 1 else tile.batch
        unsure = sum(len(strip.keys) for strip in tile.columns if strip.residual is not True)
        height = max(1, min(_TALLEST, _PAIRS // max(1, unsure if not _is_triangle(tile) else 1)))
        for start in range(0, tile.height, height):
            stop = min(tile.height, start + height)
            asked = tile._replace(batch=own, heads=slice(0, own_heads), rows=tile.rows[start:stop])
            parts = [part for strip in tile.columns for part in _seen(scores, asked, strip, start)]
            sums.add(own, asked.heads, asked.rows, parts)
    return sums.finished()


def _is_triangle(tile: Tile) -> bool:
    return all(strip.residual is True or isinstance(strip.residual, Triangle) for strip in tile.columns)


def _seen(scores: ScoreMatrix, tile: Tile, strip: Strip, start: int) -> Iterator[tuple[range, Tensor | None]]:
    """Keys of one strip that some rows of a tile, from its place ``start`` on, see; None if all of them see all."""
    if strip.residual is True:
        yield strip.keys, None
    elif isinstance(strip.residual, Triangle):
        first, last = (max(0, place + strip.residual.offset + 1) for place in (start, start + tile.height - 1))
        sure, edge = strip.keys[:first], strip.keys[first:last]
        if sure:
            yield sure, None
        if edge:
            rows = torch.arange(start, start + tile.height, device=scores.device) + strip.residual.offset
            yield edge, (torch.arange(first, first + len(edge), device=scores.device) <= rows[:, None])[None, None]
    else:
        yield strip.keys, scores.allowed(tile._replace(columns=(strip,)))


def uniform_of_blocks(outline: Outline, blocks: Iterable[Block], places: Places, near: tuple[Near, ...]) -> Uniform:
    """From the weights themselves, where nothing is known of a mask: a key is seen if its weight is not 0."""
    sums = _Sums(outline, places, near)
    for block in blocks:
        start, seen = 0, []
        for span in block.columns:
            seen.append((span, block.weights[..., start : start + len(span)] != 0))
            start += len(span)
        sums.add(block.batch, block.heads, block.rows, seen)
    return sums.finished()


class _Sums:
    """Sums over complete rows, which may come in any order."""

    def __init__(self, outline: Outline, places: Places, near: tuple[Near, ...]):
        batch, heads, q_len, kv_len = outline.shape
        self.outline, self.places, self.near = outline, places, near

        def zeros(length: int) -> Tensor:
            return torch.zeros(batch, heads, length, dtype=outline.sum_dtype, device=outline.device)

        self.visible = zeros(q_len)
        self.received = zeros(kv_len)
        self.far = zeros(q_len)
        self.counts = {one.name: zeros(q_len) for one in near}

    def add(self, batch: slice, heads: slice, rows: range, seen: Sequence[tuple[range, Tensor | None]]) -> None:
        own = (batch, heads, as_slice(rows))
        for span, allowed in seen:
            self._count(own, rows, span, allowed)
        share = 1.0 / self.visible[own].clamp_min(1.0)
        for span, allowed in seen:
            if allowed is None:
                self.received[batch, heads, as_slice(span)] += share.sum(-1, keepdim=True)
            else:
                part = (share[..., None, :] @ allowed.to(share.dtype))[..., 0, :]
                self.received[batch, heads, as_slice(span)] += part

    def _count(self, own: tuple[slice, slice, slice], rows: range, span: range, allowed: Tensor | None) -> None:
        block = Block(own[0], own[1], rows, (span,), self.visible)  # for its places alone
        q, kv = self.places.of_block(block)
        if allowed is None and len(q) == len(kv) == 1:
            q, kv = q[0, 0, :, 0].contiguous(), kv[0, 0, 0].sort().values
            self.visible[own] += len(span)
            self.far[own] += _distances(q, kv)
            for one in self.near:
                self.counts[one.name][own] += _how_many(one, q, kv)
            return
        seen = torch.ones(1, 1, len(rows), len(span), dtype=torch.bool, device=q.device) if allowed is None else allowed
        self.visible[own] += seen.sum(-1)
        lags = q - kv
        # Products of truth values and distances are sums that float64 holds exactly.
        self.far[own] += (seen * lags.abs()).sum(-1)
        for one in self.near:
            is_near = (lags if one.is_lag else kv.expand_as(lags)).ge(one.least)
            is_near = is_near & (lags if one.is_lag else kv.expand_as(lags)).le(one.most)
            self.counts[one.name][own] += (seen & is_near).sum(-1)

    def finished(self) -> Uniform:
        dtype = self.outline.dtype
        distance = self.far / self.visible.clamp_min(1.0)
        counts = {name: count.to(dtype) for name, count in self.counts.items()}
        return Uniform(self.visible.to(dtype), self.received.to(dtype), distance.to(dtype), counts)


def _distances(q: Tensor, kv: Tensor) -> Tensor:
    """Sum of the distances from each query to all keys, which ascend."""
    sums = torch.cat([kv.new_zeros(1), kv.cumsum(0)])
    before = torch.searchsorted(kv, q)
    left = q * before - sums[before]
    return left + (sums[-1] - sums[before]) - q * (len(kv) - before)


def _how_many(one: Near, q: Tensor, kv: Tensor) -> Tensor:
    """How many of the keys, which ascend, are near each query."""
    least, most = (
        (q - one.most, q - one.least) if one.is_lag else (torch.full_like(q, one.least), torch.full_like(q, one.most))
    )
    return torch.searchsorted(kv, most, right=True) - torch.searchsorted(kv, least)
