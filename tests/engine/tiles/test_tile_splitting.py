"""Tiles in pieces cover the same pairs once, in whole groups of heads and within the memory limit."""

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.engine.tiles import tile_splitting as engine
from saccade.masks import Full
from saccade.plan import ColumnRange, Tile, Triangle

BATCH, HEADS, ROWS, COLUMNS = 3, 6, 40, 60
TABLE = np.random.default_rng(0).random((ROWS, COLUMNS)) < 0.5  # what residuals that say nothing stand for


def _seen(strip: ColumnRange, rows: range) -> np.ndarray:
    """Return the pairs of a strip by its residual, bool [rows, keys of the strip]."""
    partial, whole = strip.partial, np.ones((len(rows), len(strip.keys)), dtype=bool)
    if partial is True:
        return whole
    if isinstance(partial, Triangle):
        assert (partial.rows, partial.columns) == whole.shape
        return np.tril(whole, partial.offset)
    if isinstance(partial, tuple) and partial[0] == "rows":
        _, start, count, inner = partial
        assert count == len(rows)
        return _seen(ColumnRange(strip.keys, inner), range(start + count))[start:]
    return TABLE[: len(rows)][:, list(strip.keys)]


def _pairs(tiles: Iterable[Tile]) -> np.ndarray:
    """Return how often each pair is held and allowed, int [batch, heads, rows, columns]."""
    held = np.zeros((BATCH, HEADS, ROWS, COLUMNS), dtype=int)
    for tile in tiles:
        assert 0 <= tile.batch.start < tile.batch.stop <= BATCH
        assert 0 <= tile.heads.start < tile.heads.stop <= HEADS
        assert len(tile.rows)
        for strip in tile.columns:
            assert len(strip.keys)
            held[
                tile.batch,
                tile.heads,
                slice(tile.rows.start, tile.rows.stop, tile.rows.step),
                slice(strip.keys.start, strip.keys.stop, strip.keys.step),
            ] += _seen(strip, tile.rows)
    return held


@st.composite
def tiles(draw: st.DrawFn) -> Tile:
    def cut(size: int) -> slice:
        start = draw(st.integers(0, size - 1))
        return slice(start, draw(st.integers(start + 1, size)))

    step = draw(st.sampled_from([1, 1, 3]))
    rows = range(draw(st.integers(0, 2)), draw(st.integers(3, ROWS)), step)
    edges = sorted(draw(st.sets(st.integers(0, COLUMNS), min_size=2, max_size=4)))
    strips = []
    for start, stop in zip(edges[::2], edges[1::2], strict=False):
        keys = range(start, stop, step)
        triangle = Triangle(len(rows), len(keys), draw(st.integers(-3, 9)))
        strips.append(ColumnRange(keys, draw(st.sampled_from([True, triangle, "asked"]))))
    share = draw(st.sampled_from([1, 2, 3]))
    heads = slice(0, HEADS) if share > 1 else cut(HEADS)
    return Tile(cut(BATCH), heads, rows, tuple(strips), Full())


@settings(deadline=None, max_examples=50)
@given(tiles(), st.sampled_from([1, 2, 3, 6]), st.integers(1, 50), st.sampled_from([1, 200, 2_000, 1 << 20]))
def test_pieces_hold_the_pairs_of_the_tile_once(tile: Tile, share: int, rows: int, entries: int) -> None:
    share = share if (tile.heads.stop - tile.heads.start) % share == 0 and tile.heads.start == 0 else 1
    made = list(engine.pieces(tile, share=share, rows=rows, entries=entries))
    assert np.array_equal(_pairs(made), _pairs([tile]))
    for piece in made:
        heads = piece.heads.stop - piece.heads.start
        assert piece.height <= rows
        assert heads == 1 or heads % share == piece.heads.start % share == 0
        items, least = piece.batch.stop - piece.batch.start, min(16, rows, tile.height)
        assert items * heads * piece.height * tile.width <= max(entries, least * max(1, tile.width))


@pytest.mark.parametrize("room", [1, 300, 1 << 18])
@settings(deadline=None, max_examples=50)
@given(tiles(), st.data())
def test_a_part_holds_what_is_asked_for(room: int, tile: Tile, data: st.DataObject) -> None:
    batch = data.draw(st.one_of(st.none(), st.integers(0, BATCH - 1)))
    head = data.draw(st.one_of(st.none(), st.integers(0, HEADS - 1)))
    first = data.draw(st.integers(0, ROWS))
    rows = data.draw(st.one_of(st.none(), st.just(range(first, data.draw(st.integers(first, ROWS))))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_BLOCK_ENTRIES", room)
        found = list(engine.part_of(tile, batch, head, rows))
    wanted = np.zeros((BATCH, HEADS, ROWS, COLUMNS), dtype=bool)
    wanted[
        slice(None) if batch is None else batch,
        slice(None) if head is None else head,
        slice(None) if rows is None else slice(rows.start, rows.stop),
    ] = True
    assert np.array_equal(_pairs(found), _pairs([tile]) * wanted)


@pytest.mark.parametrize("items", [1, 2])
@pytest.mark.parametrize("heads", [1, 6])
@pytest.mark.parametrize("columns", [40, 3000])
@pytest.mark.parametrize("height", [20, 1500])
@pytest.mark.parametrize("is_triangle", [True, False])
def test_a_part_of_many_pairs_takes_little_room(
    is_triangle: bool, height: int, columns: int, heads: int, items: int
) -> None:
    """A part has at most one block of entries, or up to 32 long rows in at most 16 blocks, or one row."""
    room = 1 << 10
    strip = ColumnRange(range(columns), Triangle(height, columns, 0) if is_triangle else True)
    tile = Tile(slice(1, 1 + items), slice(2, 2 + heads), range(height), (strip,), Full())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_BLOCK_ENTRIES", room)
        found = list(engine.part_of(tile, None, None, None))
    together = [(part.batch.stop - part.batch.start) * (part.heads.stop - part.heads.start) for part in found]
    assert sum(number * part.height for number, part in zip(together, found, strict=True)) == items * heads * height
    for number, part in zip(together, found, strict=True):
        assert number * part.height * part.width <= max(room, min(32 * part.width, 16 * room), part.width)


def test_small_tiles_are_not_split() -> None:
    tile = Tile(slice(1, 3), slice(2, 6), range(40), (ColumnRange(range(45), True),), Full())
    assert list(engine.pieces(tile, share=2, rows=40, entries=2 * 4 * 40 * 45)) == [tile]
    assert engine.cut(tile, share=2, rows=40, entries=4 * 40 * 45).batch == (slice(1, 2), slice(2, 3))


@pytest.mark.parametrize("rows", [range(5), range(60, 70), range(20, 20)])
def test_a_tile_has_no_part_for_other_rows(rows: range) -> None:
    tile = Tile(slice(1, 3), slice(2, 6), range(10, 50), (ColumnRange(range(45), True),), Full())
    assert list(engine.part_of(tile, None, None, rows)) == []


def test_keys_that_all_rows_see_need_no_mask_in_a_part() -> None:
    strips = (ColumnRange(range(4), True), ColumnRange(range(6, 9), "asked"))
    tile = Tile(slice(0, 1), slice(0, 1), range(10, 20), strips, Full())
    some = engine.few_rows(tile, 2, 5)
    assert some.rows == range(12, 15)
    assert some.columns == (strips[0], ColumnRange(range(6, 9), ("rows", 2, 3, "asked")))
