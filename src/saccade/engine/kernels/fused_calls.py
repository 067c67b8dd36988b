"""The fused kernel's calls to torch's flash operation, each with its additive mask."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels import aten_flash
from saccade.engine.tiles.index_ranges import joined
from saccade.engine.tiles.tile_splitting import pieces
from saccade.plan import ColumnRange, Ranges, Tile, Triangle

# Tiles with many columns visible to all rows run in two calls, which saves adding zeros to most scores.
_WIDE = 2048
_FEW_ROWS, _LONG = 16, 256  # for so few rows, copying a range of so many keys costs more than one more call
_READ_ROWS, _READ_ENTRIES = 256, 1 << 22  # largest tile whose bias is read from a table: 16 MB


class Call(NamedTuple):
    """One call to torch's flash operation.

    Attributes:
        tile: the tile's rows, with only the columns that the call covers.
        causal: whether the operation's causal flag masks the pairs. With a bias, the additive mask masks them instead.
        is_fully_visible: whether every column is visible to every row.
        is_first: whether this is the first call for its tile.
    """

    tile: Tile
    causal: bool
    is_fully_visible: bool
    is_first: bool = True

    @property
    def columns(self) -> Ranges:
        """Columns of the call with adjacent ranges joined, so that most calls read a single view of the keys."""
        return joined(self.tile.spans) or (range(0),)

    @property
    def is_masked(self) -> bool:
        """Whether an additive mask has to mask some pairs."""
        return not (self.causal or self.is_fully_visible)

    @property
    def pairs(self) -> int:
        """Number of query-key pairs whose scores the call computes, summed over batch items and heads."""
        items, heads = (span.stop - span.start for span in (self.tile.batch, self.tile.heads))
        return items * heads * aten_flash.pairs(self.tile.height, self.tile.width, self.causal)


def calls_of(inputs: AttentionInputs, tile: Tile) -> Iterator[Call]:
    """Yield the calls to torch's flash operation for one tile. The calls cover each column of the tile once."""
    for number, (columns, is_triangle) in enumerate(_column_groups(tile)):
        causal, is_fully_visible = is_triangle and inputs.bias is None, not is_triangle and _all_fully_visible(columns)
        yield Call(tile._replace(columns=columns), causal, is_fully_visible, number == 0)


def single_call(inputs: AttentionInputs) -> Call | None:
    """Return the call to torch's flash operation that computes the full product; None if one call is not enough.

    The call covers all rows and columns or, without a bias, a single range of columns, so that its keys are a view.
    """
    plan, bias = inputs.plan, inputs.bias
    key = ("single call", bias is None, bias is None or bias.is_materialised)
    if key in plan.memo:
        return cast("Call | None", plan.memo[key])
    call, shape = None, plan.shape
    if plan.count == 1 and key[2]:  # a single tile contains all rows
        (tile,) = plan.tiles
        if len(tile.columns) == 1 and tile.columns[0].partial is True:  # most decoding steps
            is_whole = len(tile.columns[0].keys) == shape[3]
            call = Call(tile, False, True) if is_whole or bias is None else None
        else:
            calls = list(calls_of(inputs, tile))
            is_whole = tile.width == shape[3] or (bias is None and len(joined(tile.spans)) == 1)
            call = calls[0] if len(calls) == 1 and is_whole else None
    plan.memo[key] = call
    return call


def tiles_of(inputs: AttentionInputs) -> Iterable[Tile]:
    """Return the tiles of the plan, split if reading the bias of a full tile would take too much memory."""
    if inputs.bias is None or inputs.bias.is_materialised:
        return inputs.plan.tiles
    share = inputs.query.shape[1] // inputs.key.shape[1] if inputs.key.shape[1] else 1
    cut = (pieces(tile, share=share, rows=_READ_ROWS, entries=_READ_ENTRIES) for tile in inputs.plan.tiles)
    return itertools.chain.from_iterable(cut)


def _column_groups(tile: Tile) -> Iterator[tuple[tuple[ColumnRange, ...], bool]]:
    """Yield, for each call to torch's flash operation on a tile, the columns and whether they form a causal square."""
    if not tile.columns:
        yield (), False
        return
    all_rows = tuple(strip for strip in tile.columns if strip.partial is True)
    undecided = tuple(strip for strip in tile.columns if strip.partial is not True)
    if len(undecided) == 1 and isinstance(undecided[0].partial, Triangle) and undecided[0].partial.is_square:
        width = sum(len(strip.keys) for strip in all_rows)
        if not all_rows or width >= min(_WIDE, tile.height):
            if all_rows:
                yield all_rows, False
            yield undecided, True
            return
    if undecided and sum(len(strip.keys) for strip in all_rows) >= _WIDE:
        yield all_rows, False
        yield undecided, False
    elif tile.height <= _FEW_ROWS and not undecided:
        for columns in _long_ranges(all_rows):
            yield columns, False
    else:
        yield tile.columns, False


def _long_ranges(all_rows: tuple[ColumnRange, ...]) -> Iterator[tuple[ColumnRange, ...]]:
    """Yield each long column range separately, so that its keys are a view, and the short ranges together.

    With few rows, copying the keys of a long range costs more than one more call.
    """
    short = []
    for strip in all_rows:
        if len(strip.keys) >= _LONG:
            yield (strip,)
        else:
            short.append(strip)
    if short:
        yield tuple(short)


def _all_fully_visible(strips: tuple[ColumnRange, ...]) -> bool:
    return all(strip.partial is True for strip in strips)
