"""The blocks of rows that the tiled kernel works through; what runs them and what prices them read the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from saccade.engine.inputs import AttentionInputs
from saccade.engine.tiles.tile_splitting import Cut, cut, few_rows
from saccade.plan import Tile

__all__ = ["Blocks", "blocks_of", "cuts_of"]

_ROWS = 128
_ENTRIES = 1 << 20  # scores of a block: 4 MB in float32, four heads of 128 rows at 2,048 keys
_NARROW = 2048  # keys


class Blocks(NamedTuple):
    """A tile and how it is cut."""

    tile: Tile
    cut: Cut

    def rows(self) -> Iterator[Tile]:
        """The blocks of all batch items and heads at once, from the first rows to the last."""
        for start, stop in self.cut.rows:
            piece = few_rows(self.tile, start, stop)
            if piece.width:  # the first rows of a triangle may see nothing
                yield piece

    @property
    def pairs(self) -> int:
        """Query-key pairs of all blocks."""
        items, heads = (span.stop - span.start for span in (self.tile.batch, self.tile.heads))
        return items * heads * sum(piece.height * piece.width for piece in self.rows())


def cuts_of(inputs: AttentionInputs) -> Iterator[Blocks]:
    """The tiles that have columns, each with its cut."""
    share = inputs.shape[1] // inputs.key.shape[1] if inputs.key.shape[1] else 1
    for tile in inputs.row_plan.tiles:
        if tile.width:
            # Long rows are taken twice as many at a time: products of more rows are faster, and caches are left anyway.
            times = 1 if tile.width <= _NARROW else 2
            yield Blocks(tile, cut(tile, share=share, rows=times * _ROWS, entries=times * _ENTRIES))


def blocks_of(inputs: AttentionInputs) -> Iterator[Tile]:
    """The blocks, one by one."""
    for blocks in cuts_of(inputs):
        for batch in blocks.cut.batch:
            for heads in blocks.cut.heads:
                for piece in blocks.rows():
                    yield piece._replace(batch=batch, heads=heads)
