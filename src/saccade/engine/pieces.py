"""Tiles in pieces of a size that suits the caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from saccade.plan import Strip, Tile, Triangle

__all__ = ["Cut", "cut", "few_rows", "pieces"]

_FEWEST_ROWS = 16  # of a piece that is cut: fewer make a poor matrix product


class Cut(NamedTuple):
    """How a tile is cut: every one of the batch items with every one of the heads and of the rows is a piece.

    Attributes:
        batch, heads: slices of both, largest first.
        rows: (start, stop) of rows, by their place in the tile.
    """

    batch: tuple[slice, ...]
    heads: tuple[slice, ...]
    rows: tuple[tuple[int, int], ...]


def pieces(tile: Tile, *, share: int, rows: int, entries: int) -> Iterator[Tile]:
    """Cut a tile, all columns wide, into pieces of complete rows; see `cut`."""
    made = cut(tile, share=share, rows=rows, entries=entries)
    for batch in made.batch:
        for heads in made.heads:
            for start, stop in made.rows:
                yield few_rows(tile, start, stop)._replace(batch=batch, heads=heads)


def cut(tile: Tile, *, share: int, rows: int, entries: int) -> Cut:
    """Where a tile is cut.

    Args:
        tile: any tile.
        share: query heads per key head. A piece holds whole groups of heads, or one head.
        rows: most rows of a piece.
        entries: scores that a piece should hold at most.
    """
    items, heads = range(tile.batch.start, tile.batch.stop), range(tile.heads.start, tile.heads.stop)
    width = max(1, tile.width)
    unit = share if share * _FEWEST_ROWS * width <= entries else 1
    height = max(1, min(tile.height, rows, max(_FEWEST_ROWS, entries // (width * unit))))
    several = max(1, entries // (width * height * unit)) * unit
    together = max(1, entries // (width * height * len(heads))) if several >= len(heads) else 1
    starts = range(0, tile.height, height)
    return Cut(
        tuple(slice(items[i], items[min(i + together, len(items)) - 1] + 1) for i in range(0, len(items), together)),
        tuple(slice(heads[h], heads[min(h + several, len(heads)) - 1] + 1) for h in range(0, len(heads), several)),
        tuple((start, min(start + height, tile.height)) for start in starts),
    )


def few_rows(tile: Tile, start: int, stop: int) -> Tile:
    """Some rows of a tile, by their place in it, with the columns that these rows need of a triangle."""
    if stop - start == tile.height:
        return tile
    columns: list[Strip] = []
    for strip in tile.columns:
        columns.extend(_cut(strip, start, stop))
    return tile._replace(rows=tile.rows[start:stop], columns=tuple(columns))


def _cut(strip: Strip, start: int, stop: int) -> Iterator[Strip]:
    """A strip of some rows of its tile: a residual key says what the rows of the whole tile hold."""
    residual = strip.residual
    if residual is True:
        yield strip
    elif isinstance(residual, Triangle):
        # The first of these rows sees the columns that all of them see, the last one all that any of them sees.
        sure, needed = (min(max(0, end + residual.offset), len(strip.keys)) for end in (start + 1, stop))
        if sure:
            yield Strip(strip.keys[:sure], True)
        if sure < needed:
            edge = Triangle(stop - start, needed - sure, residual.offset + start - sure)
            yield Strip(strip.keys[sure:needed], edge)
    else:
        yield Strip(strip.keys, ("rows", start, stop - start, residual))
