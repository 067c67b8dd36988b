"""The calls of torch's flash operation that a product is made of; what runs them and what prices them read the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels import aten_flash
from saccade.engine.tiles.grouped_heads import joined
from saccade.engine.tiles.tile_splitting import pieces
from saccade.plan import Ranges, Strip, Tile, Triangle

__all__ = ["Call", "calls_of", "single_call", "tiles_of"]

# A tile whose sure columns are many is run in two parts, which saves adding zeros to most of its scores.
_WIDE = 2048
_FEW_ROWS, _LONG = 16, 256  # rows of a tile, and keys of a range, from which on a copy of the keys is dear
_READ_ROWS, _READ_ENTRIES = 256, 1 << 22  # of a tile whose bias has to be read from a table: 16 MB in float32


class Call(NamedTuple):
    """One call of the operation.

    Attributes:
        tile: the rows, and those columns of a tile that the call takes.
        causal: whether the operation's own flag hides what is hidden of it; with a bias, the terms say it instead.
        is_sure: whether every row has every column.
        is_first: whether it is the first of its tile.
    """

    tile: Tile
    causal: bool
    is_sure: bool
    is_first: bool = True

    @property
    def columns(self) -> Ranges:
        """The columns, neighbouring ranges joined, so that most calls read one view of the keys."""
        return joined(self.tile.spans) or (range(0),)

    @property
    def pairs(self) -> int:
        """Query-key pairs whose scores the operation computes, over batch items and heads."""
        items, heads = (span.stop - span.start for span in (self.tile.batch, self.tile.heads))
        return items * heads * aten_flash.pairs(self.tile.height, self.tile.width, self.causal)


def calls_of(inputs: AttentionInputs, tile: Tile) -> Iterator[Call]:
    """The calls of one tile; over all of them, each of its columns is taken once."""
    for number, (columns, is_triangle) in enumerate(_parts(tile)):
        causal, is_sure = is_triangle and inputs.bias is None, not is_triangle and _all_sure(columns)
        yield Call(tile._replace(columns=columns), causal, is_sure, number == 0)


def single_call(inputs: AttentionInputs) -> Call | None:
    """The one call that takes every row, if there is one: its result is the product's.

    It takes all columns; without a bias, one range of them will do, whose keys are a view.
    """
    plan, bias = inputs.plan, inputs.bias
    key = ("single call", bias is None, bias is None or bias.is_written_out)
    if key in plan.memo:
        return cast("Call | None", plan.memo[key])
    found, shape = None, plan.shape
    if plan.count == 1 and key[2]:  # a plan of one tile has all rows in it
        (tile,) = plan.tiles
        if len(tile.columns) == 1 and tile.columns[0].residual is True:  # most steps of decoding
            is_whole = len(tile.columns[0].keys) == shape[3]
            found = Call(tile, False, True) if is_whole or bias is None else None
        else:
            calls = list(calls_of(inputs, tile))
            is_whole = tile.width == shape[3] or (bias is None and len(joined(tile.spans)) == 1)
            found = calls[0] if len(calls) == 1 and is_whole else None
    plan.memo[key] = found
    return found


def tiles_of(inputs: AttentionInputs) -> Iterable[Tile]:
    """The tiles of the plan, cut where reading the bias of a whole one would take much memory."""
    if inputs.bias is None or inputs.bias.is_written_out:
        return inputs.plan.tiles
    share = inputs.query.shape[1] // inputs.key.shape[1] if inputs.key.shape[1] else 1
    cut = (pieces(tile, share=share, rows=_READ_ROWS, entries=_READ_ENTRIES) for tile in inputs.plan.tiles)
    return itertools.chain.from_iterable(cut)


def _parts(tile: Tile) -> Iterator[tuple[tuple[Strip, ...], bool]]:
    """The columns of each call, and whether they are a causal square."""
    if not tile.columns:
        yield (), False
        return
    sure = tuple(strip for strip in tile.columns if strip.residual is True)
    unsure = tuple(strip for strip in tile.columns if strip.residual is not True)
    if len(unsure) == 1 and isinstance(unsure[0].residual, Triangle) and unsure[0].residual.is_square:
        width = sum(len(strip.keys) for strip in sure)
        if not sure or width >= min(_WIDE, tile.height):
            if sure:
                yield sure, False
            yield unsure, True
            return
    if unsure and sum(len(strip.keys) for strip in sure) >= _WIDE:
        yield sure, False
        yield unsure, False
    elif tile.height <= _FEW_ROWS and not unsure:
        for columns in _runs(sure):
            yield columns, False
    else:
        yield tile.columns, False


def _runs(sure: tuple[Strip, ...]) -> Iterator[tuple[Strip, ...]]:
    """Long ranges one by one, as views: a few rows are computed faster than the keys of a range are copied."""
    short = []
    for strip in sure:
        if len(strip.keys) >= _LONG:
            yield (strip,)
        else:
            short.append(strip)
    if short:
        yield tuple(short)


def _all_sure(strips: tuple[Strip, ...]) -> bool:
    return all(strip.residual is True for strip in strips)
