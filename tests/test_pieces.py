"""Tiles cut in pieces: together they hold what the tile holds, each pair once."""

from collections import Counter
from collections.abc import Iterator

import pytest

from saccade.engine.pieces import cut, part_of, pieces
from saccade.masks import Full
from saccade.plan import Strip, Tile, Triangle

TILES = {
    "sure": (Strip(range(3, 43), True),),
    "a causal square": (Strip(range(40), Triangle(40, 40, 0)),),
    "before a square": (Strip(range(5), True), Strip(range(5, 45), Triangle(40, 40, 0))),
    "a triangle that begins late": (Strip(range(30), Triangle(40, 30, -12)),),
    "a triangle that begins early": (Strip(range(50), Triangle(40, 50, 7)),),
    "steps": (Strip(range(1, 80, 2), True), Strip(range(0, 8, 4), True)),
}


def tile_of(name: str, rows: range = range(40), heads: int = 4) -> Tile:
    return Tile(slice(1, 3), slice(2, 2 + heads), rows, TILES[name], Full())


def held(tile: Tile) -> Iterator[tuple[int, int, int, int]]:
    """The pairs of a tile that are seen, one by one: batch item, head, row and column, in indices."""
    for b in range(tile.batch.start, tile.batch.stop):
        for h in range(tile.heads.start, tile.heads.stop):
            for r, row in enumerate(tile.rows):
                for keys, residual in tile.columns:
                    for c, key in enumerate(keys):
                        if residual is True or (isinstance(residual, Triangle) and c <= r + residual.offset):
                            yield b, h, row, key


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize(
    ("rows", "entries", "share", "heads"),
    [(100, 1 << 20, 2, 4), (7, 1 << 20, 1, 4), (40, 3000, 2, 6), (9, 900, 2, 4), (40, 1, 4, 4), (40, 2900, 4, 4)],
)
def test_pieces_hold_each_pair_once(name: str, rows: int, entries: int, share: int, heads: int) -> None:
    tile = tile_of(name, heads=heads)
    found = list(pieces(tile, share=share, rows=rows, entries=entries))
    assert Counter(pair for piece in found for pair in held(piece)) == Counter(held(tile))
    for piece in found:
        own = piece.heads.stop - piece.heads.start
        assert own == 1 or (own % share == 0 and (piece.heads.start - tile.heads.start) % share == 0)
        assert piece.height <= rows
        for keys, residual in piece.columns:
            assert not isinstance(residual, Triangle) or residual[:2] == (piece.height, len(keys))
        items = piece.batch.stop - piece.batch.start
        # Not fewer than 16 rows of one head: fewer make a poor product.
        assert items * own * piece.height * tile.width <= max(entries, 16 * tile.width)


def test_what_is_small_is_not_cut() -> None:
    tile = tile_of("before a square")
    assert list(pieces(tile, share=2, rows=40, entries=2 * 4 * 40 * 45)) == [tile]
    assert cut(tile, share=2, rows=40, entries=4 * 40 * 45).batch == (slice(1, 2), slice(2, 3))


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("room", [1 << 18, 2000, 300])
@pytest.mark.parametrize(
    ("rows", "batch", "head"),
    [(None, None, None), (range(12, 31), 2, None), (range(30), None, 3), (None, 1, 2), (None, 0, None), (None, 2, 6)],
)
def test_a_part_holds_what_is_asked_for(
    name: str, room: int, rows: range | None, batch: int | None, head: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.engine.pieces._BLOCK_ENTRIES", room)
    tile = tile_of(name, range(5, 85, 2) if name == "steps" else range(10, 50))
    want = Counter(
        pair
        for pair in held(tile)
        if (batch is None or pair[0] == batch)
        and (head is None or pair[1] == head)
        and (rows is None or pair[2] in rows)
    )
    assert Counter(pair for piece in part_of(tile, batch, head, rows) for pair in held(piece)) == want


@pytest.mark.parametrize("rows", [range(5), range(60, 70), range(20, 20)])
def test_of_rows_that_it_has_not_there_is_no_part(rows: range) -> None:
    assert list(part_of(tile_of("sure", range(10, 50)), None, None, rows)) == []
