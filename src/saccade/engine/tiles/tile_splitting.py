"""Split tiles into chunks that fit into the processor's caches."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from saccade.plan import ColumnRange, Tile, Triangle

_BLOCK_ENTRIES = 1 << 18  # weights that are computed at a time: about a megabyte, which fits into a core's L2 cache
_FEWEST_ROWS = 16  # smallest number of rows in a chunk, because matrix products with fewer rows are slow


class Cut(NamedTuple):
    """A split of a tile into chunks, one for each combination of a batch slice, a head slice and a group of rows.

    Attributes:
        batch, heads: slices of batch items and of heads, largest first.
        rows: (start, stop) of each group of rows, counted from the tile's first row.
    """

    batch: tuple[slice, ...]
    heads: tuple[slice, ...]
    rows: tuple[tuple[int, int], ...]


def pieces(tile: Tile, *, share: int, rows: int, entries: int) -> Iterator[Tile]:
    """Yield the chunks of a tile, each with all columns that its rows need; see `cut`."""
    split = cut(tile, share=share, rows=rows, entries=entries)
    for batch in split.batch:
        for heads in split.heads:
            for start, stop in split.rows:
                yield few_rows(tile, start, stop)._replace(batch=batch, heads=heads)


def cut(tile: Tile, *, share: int, rows: int, entries: int) -> Cut:
    """Choose where to split a tile into chunks.

    Args:
        tile: the tile to split.
        share: number of query heads per key head. A chunk has full groups of heads, or a single head.
        rows: largest number of rows in a chunk.
        entries: largest number of scores that a chunk should have.
    """
    items, heads = range(tile.batch.start, tile.batch.stop), range(tile.heads.start, tile.heads.stop)
    width = max(1, tile.width)
    unit = share if share * min(_FEWEST_ROWS, tile.height, rows) * width <= entries else 1
    height = max(1, min(tile.height, rows, max(_FEWEST_ROWS, entries // (width * unit))))
    several = max(1, entries // (width * height * unit)) * unit if unit == share else 1
    together = max(1, entries // (width * height * len(heads))) if several >= len(heads) else 1
    starts = range(0, tile.height, height)
    return Cut(
        tuple(slice(items[i], items[min(i + together, len(items)) - 1] + 1) for i in range(0, len(items), together)),
        tuple(slice(heads[h], heads[min(h + several, len(heads)) - 1] + 1) for h in range(0, len(heads), several)),
        tuple((start, min(start + height, tile.height)) for start in starts),
    )


def few_rows(tile: Tile, start: int, stop: int) -> Tile:
    """Return rows ``start`` to ``stop`` of a tile, without the columns of a triangle that these rows do not need."""
    if stop - start == tile.height:
        return tile
    columns: list[ColumnRange] = []
    for strip in tile.columns:
        columns.extend(_cut_columns(strip, start, stop))
    return tile._replace(rows=tile.rows[start:stop], columns=tuple(columns))


def _cut_columns(strip: ColumnRange, start: int, stop: int) -> Iterator[ColumnRange]:
    """Yield the parts of a column range that rows ``start`` to ``stop`` need, with new cache keys for masked pairs."""
    partial = strip.partial
    if partial is True:
        yield strip
    elif isinstance(partial, Triangle):
        # The first row sees only the columns visible to all rows; the last row sees every column visible to any row.
        all_rows, any_row = (min(max(0, end + partial.offset), len(strip.keys)) for end in (start + 1, stop))
        if all_rows:
            yield ColumnRange(strip.keys[:all_rows], True)
        if all_rows < any_row:
            edge = Triangle(stop - start, any_row - all_rows, partial.offset + start - all_rows)
            yield ColumnRange(strip.keys[all_rows:any_row], edge)
    else:
        yield ColumnRange(strip.keys, ("rows", start, stop - start, partial))


def part_of(tile: Tile, batch: int | None, head: int | None, rows: range | None) -> Iterator[Tile]:
    """Yield the part of a tile with the given batch item, head and rows (None for all), in chunks of about a megabyte.

    A small part is a single chunk. A larger part is split into chunks with a few rows of one head of one batch item.
    """
    first, last = (0, tile.height) if rows is None else (bisect_left(tile.rows, end) for end in (rows.start, rows.stop))
    items, heads = tile.batch, tile.heads
    if batch is not None:
        items = slice(max(items.start, batch), min(items.stop, batch + 1))
    if head is not None:
        heads = slice(max(heads.start, head), min(heads.stop, head + 1))
    if first >= last or items.start >= items.stop or heads.start >= heads.stop:
        return
    whole = few_rows(tile._replace(batch=items, heads=heads), first, last)
    if (items.stop - items.start) * (heads.stop - heads.start) * whole.height * whole.width <= _BLOCK_ENTRIES:
        if whole.width:
            yield whole
        return
    for b in range(items.start, items.stop):
        for h in range(heads.start, heads.stop):
            start = first
            while start < last:
                # A triangle widens from row to row. Products of fewer than 32 rows are slow, unless rows are so long
                # that even 32 of them are many times a block.
                width = max(1, few_rows(tile, start, min(last, start + math.isqrt(_BLOCK_ENTRIES))).width)
                height = max(1, _BLOCK_ENTRIES // width, min(32, 16 * _BLOCK_ENTRIES // width))
                few = few_rows(tile, start, min(last, start + height))
                if few.width:
                    yield few._replace(batch=slice(b, b + 1), heads=slice(h, h + 1))
                start += height
