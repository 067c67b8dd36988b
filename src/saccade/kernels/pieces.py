"""Tiles in pieces of a size that suits the caches."""

from __future__ import annotations

from collections.abc import Iterator

from saccade.plan import Strip, Tile, Triangle

__all__ = ["pieces"]

_FEWEST_ROWS = 16  # of a piece that is cut: fewer make a poor matrix product


def pieces(tile: Tile, *, share: int, rows: int, entries: int) -> Iterator[Tile]:
    """Cut a tile, all columns wide, into pieces of complete rows.

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
    for i in range(0, len(items), together):
        for h in range(0, len(heads), several):
            batch = slice(items[i], items[min(i + together, len(items)) - 1] + 1)
            own = slice(heads[h], heads[min(h + several, len(heads)) - 1] + 1)
            for start in range(0, tile.height, height):
                some = tile.rows[start : start + height]
                columns = tile.columns
                if len(some) < tile.height:
                    columns = tuple(_cut(strip, start, len(some)) for strip in columns)
                yield Tile(batch, own, some, columns, tile.rule)


def _cut(strip: Strip, start: int, rows: int) -> Strip:
    """A strip of some rows of its tile: a residual key says what the rows of the whole tile hold."""
    residual = strip.residual
    if residual is True:
        return strip
    if isinstance(residual, Triangle):
        return Strip(strip.keys, Triangle(rows, residual.columns, residual.offset + start))
    return Strip(strip.keys, ("rows", start, rows, residual))
