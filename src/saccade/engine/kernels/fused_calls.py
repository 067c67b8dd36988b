"""The calls of torch's flash operation for a product, and the terms that each call adds to its scores."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator
from contextlib import nullcontext
from typing import NamedTuple, cast

import torch
from torch import Tensor

from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels import aten_flash
from saccade.engine.tiles.grouped_heads import joined
from saccade.engine.tiles.tile_scores import allowed
from saccade.engine.tiles.tile_splitting import pieces
from saccade.plan import ColumnRange, Ranges, Tile, Triangle
from saccade.support.torch_modes import unobserved

# Tiles with many columns that all rows see run in two calls, which saves adding zeros to most scores.
_WIDE = 2048
_FEW_ROWS, _LONG = 16, 256  # rows of a tile, and keys of a range, for which copying keys costs more than a call
_READ_ROWS, _READ_ENTRIES = 256, 1 << 22  # of a tile whose bias is read from a table: 16 MB in float32


class Call(NamedTuple):
    """One call of torch's flash operation.

    Attributes:
        tile: the rows, and the columns of a tile that the call takes.
        causal: whether the operation's causal flag hides pairs; with a bias, the added_terms terms do instead.
        is_sure: whether every row sees every column.
        is_first: whether it is the first call of its tile.
    """

    tile: Tile
    causal: bool
    is_sure: bool
    is_first: bool = True

    @property
    def columns(self) -> Ranges:
        """The columns with neighbouring ranges joined, so that most calls read one view of the keys."""
        return joined(self.tile.spans) or (range(0),)

    @property
    def pairs(self) -> int:
        """The number of query-key pairs whose scores a fused call computes, over batch items and heads."""
        items, heads = (span.stop - span.start for span in (self.tile.batch, self.tile.heads))
        return items * heads * aten_flash.pairs(self.tile.height, self.tile.width, self.causal)


def calls_of(inputs: AttentionInputs, tile: Tile) -> Iterator[Call]:
    """Yield the fused calls of one tile, which together take each of its columns once."""
    for number, (columns, is_triangle) in enumerate(_column_groups(tile)):
        causal, is_sure = is_triangle and inputs.bias is None, not is_triangle and _all_sure(columns)
        yield Call(tile._replace(columns=columns), causal, is_sure, number == 0)


def single_call(inputs: AttentionInputs) -> Call | None:
    """Return the one fused call whose result is that of the product; None if there are several.

    It takes every row and all columns; without a bias, one range of columns is enough, whose keys are a view.
    """
    plan, bias = inputs.plan, inputs.bias
    key = ("single call", bias is None, bias is None or bias.is_written_out)
    if key in plan.memo:
        return cast("Call | None", plan.memo[key])
    found, shape = None, plan.shape
    if plan.count == 1 and key[2]:  # a plan of one tile has all rows in it
        (tile,) = plan.tiles
        if len(tile.columns) == 1 and tile.columns[0].partial is True:  # most steps of decoding
            is_whole = len(tile.columns[0].keys) == shape[3]
            found = Call(tile, False, True) if is_whole or bias is None else None
        else:
            calls = list(calls_of(inputs, tile))
            is_whole = tile.width == shape[3] or (bias is None and len(joined(tile.spans)) == 1)
            found = calls[0] if len(calls) == 1 and is_whole else None
    plan.memo[key] = found
    return found


def tiles_of(inputs: AttentionInputs) -> Iterable[Tile]:
    """Return the tiles of the plan, split if reading the bias of a whole tile would take much memory."""
    if inputs.bias is None or inputs.bias.is_written_out:
        return inputs.plan.tiles
    share = inputs.query.shape[1] // inputs.key.shape[1] if inputs.key.shape[1] else 1
    cut = (pieces(tile, share=share, rows=_READ_ROWS, entries=_READ_ENTRIES) for tile in inputs.plan.tiles)
    return itertools.chain.from_iterable(cut)


def _column_groups(tile: Tile) -> Iterator[tuple[tuple[ColumnRange, ...], bool]]:
    """Yield the columns of each fused call of a tile, and whether they are a causal square."""
    if not tile.columns:
        yield (), False
        return
    all_rows = tuple(strip for strip in tile.columns if strip.partial is True)
    unsure = tuple(strip for strip in tile.columns if strip.partial is not True)
    if len(unsure) == 1 and isinstance(unsure[0].partial, Triangle) and unsure[0].partial.is_square:
        width = sum(len(strip.keys) for strip in all_rows)
        if not all_rows or width >= min(_WIDE, tile.height):
            if all_rows:
                yield all_rows, False
            yield unsure, True
            return
    if unsure and sum(len(strip.keys) for strip in all_rows) >= _WIDE:
        yield all_rows, False
        yield unsure, False
    elif tile.height <= _FEW_ROWS and not unsure:
        for columns in _long_ranges(all_rows):
            yield columns, False
    else:
        yield tile.columns, False


def _long_ranges(all_rows: tuple[ColumnRange, ...]) -> Iterator[tuple[ColumnRange, ...]]:
    """Yield long ranges of columns one by one, as views: computing a few rows costs less than copying their keys."""
    short = []
    for strip in all_rows:
        if len(strip.keys) >= _LONG:
            yield (strip,)
        else:
            short.append(strip)
    if short:
        yield tuple(short)


def _all_sure(strips: tuple[ColumnRange, ...]) -> bool:
    return all(strip.partial is True for strip in strips)


_MEMO_ENTRIES = 1 << 22  # entries of residual tensors that a plan may cache: 16 MB in float32


class Added(NamedTuple):
    """Terms added to the scores of a fused call, and the rows that they leave without a key."""

    terms: Tensor | None
    empty: Tensor | None

    @classmethod
    def of(cls, terms: Tensor) -> Added:
        """Return the terms with their empty rows, which are found once."""
        empty = (terms == -math.inf).all(-1)
        return cls(terms, empty if bool(empty.any()) else None)


NOTHING = Added(None, None)


def added_terms(inputs: AttentionInputs, call: Call) -> Added:
    """Return the terms that a fused call adds to its scores: the bias, and -inf at hidden pairs."""
    hidden = NOTHING if call.causal or call.is_sure else _cached_hidden_terms(inputs, call)
    return hidden if inputs.bias is None or not call.tile.columns else with_bias(inputs, call.tile, hidden.terms)


def with_bias(inputs: AttentionInputs, piece: Tile, hidden: Tensor | None) -> Added:
    """Return the bias of a tile with -inf at hidden pairs, as terms of a fused call."""
    assert inputs.bias is not None  # callers have checked
    bias = inputs.bias.read(piece)
    bias = bias if bias.dtype == torch.float32 else bias.to(inputs.query.dtype)  # the operation takes these two dtypes
    bias = bias if bias.stride(3) in (0, 1) else bias.contiguous()  # the operation would do it in each call
    # Fill instead of adding, so that a NaN of the bias at a hidden pair is hidden too.
    terms = bias if hidden is None else bias.masked_fill(hidden == -math.inf, -math.inf)
    return Added.of(terms.expand(*terms.shape[:2], piece.height, piece.width))


def hidden_key(inputs: AttentionInputs, call: Call) -> Hashable:
    """Return a cache key of a fused call: calls with equal keys hide the same pairs."""
    piece = call.tile
    return (
        inputs.query.dtype,
        inputs.device,
        piece.height,
        *((piece.batch.start, piece.batch.stop) if inputs.rule.shape[0] > 1 else ()),
        *((piece.heads.start, piece.heads.stop) if inputs.rule.shape[1] > 1 else ()),
        *((len(strip.keys), strip.partial) for strip in piece.columns),
    )


def fits_into_cache(entries: int, held: int) -> bool:
    """Return whether terms with so many entries may be cached with their plan, beside those cached already."""
    return entries + held <= _MEMO_ENTRIES


def _cached_hidden_terms(inputs: AttentionInputs, call: Call) -> Added:
    """Return terms of 0 at allowed and -inf at hidden pairs of a call; cached with the plan if the mask is a value."""
    key = hidden_key(inputs, call)
    memo = inputs.plan.memo if inputs.rule.is_value else {}
    kept = memo.get(key)
    if isinstance(kept, Added):
        return kept
    with unobserved() if inputs.rule.is_value else nullcontext():
        found = hidden_terms(inputs, call.tile)
    held = sum(x.terms.numel() for x in list(memo.values()) if isinstance(x, Added) and x.terms is not None)
    if found.terms is not None and fits_into_cache(found.terms.numel(), held):
        memo[key] = found
    return found


def hidden_terms(inputs: AttentionInputs, piece: Tile) -> Added:
    """Return terms of 0 at allowed and -inf at hidden pairs of a tile, computed without the cache."""
    seen = allowed(inputs, piece)
    assert seen is not None  # some column range is partial
    if inputs.rule.is_value:  # the cache serves all items and heads that the mask does not distinguish
        items, heads = inputs.rule.shape
        seen = seen[: 1 if items == 1 else None, : 1 if heads == 1 else None]
    terms = torch.full(seen.shape, -math.inf, dtype=inputs.query.dtype, device=inputs.device)
    terms.masked_fill_(seen, 0.0)
    empty = ~seen.any(-1)
    return Added(terms, empty if bool(empty.any()) else None)
