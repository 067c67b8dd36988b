"""Tests of terms added to the scores, read and accumulated tile by tile, against the whole matrix."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import saccade as sc
from saccade import positions
from saccade.engine.bias.relative import DistanceTerm
from saccade.engine.bias.term import DenseTerm, MaskedTerm, Term
from saccade.masks import Full
from saccade.plan import ColumnRange, Tile

B, H, L, S, T = SIZES = 2, 3, 5, 7, 6


class Written(NamedTuple):
    """A term, and a function from its source to the whole matrix, which autograd differentiates."""

    term: Term
    whole: Callable[[Tensor], Tensor]


def _pairs() -> list[tuple[int, int, int, int]]:
    return list(itertools.product(*map(range, SIZES[:4])))


def _dense(*shape: int) -> Written:
    return Written(DenseTerm(torch.randn(shape, dtype=torch.float64)), lambda source: source.expand(SIZES[:4]))


def _distances(*shape: int, first: int = 0, at: tuple[list[list[int]], list[list[int]]] | None = None) -> Written:
    q_at, kv_at = (None, None) if at is None else map(torch.tensor, at)
    lowest = -2

    def place(b: int, h: int, q: int, kv: int) -> tuple[int, ...]:
        if at is None:
            distance = q - kv + first
        else:
            distance = at[0][b if len(at[0]) > 1 else 0][q] - at[1][b if len(at[1]) > 1 else 0][kv]
        own = (b, h, q, min(max(distance - lowest, 0), T - 1))
        return tuple(index if size > 1 else 0 for index, size in zip(own, shape, strict=True))

    def whole(source: Tensor) -> Tensor:
        return torch.stack([source[place(*pair)] for pair in _pairs()]).view(SIZES[:4])

    return Written(DistanceTerm(torch.randn(shape, dtype=torch.float64), lowest, first, q_at, kv_at), whole)


def _hiding(inner: Written | None) -> Written:
    queries, keys = torch.rand(B, H, L) < 0.3, torch.rand(B, H, S) < 0.3
    hidden = queries[..., None] | keys[:, :, None]
    term = MaskedTerm(
        None if inner is None else inner.term, queries, keys, torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    )

    def whole(source: Tensor) -> Tensor:
        shown = source.expand(SIZES[:4]) if inner is None else inner.whole(source)
        return shown.masked_fill(hidden, -math.inf)

    return Written(term, whole)


APART = ([[0, 1, 3, 4, 9], [2, 2, 5, 0, 1]], [[0, 1, 2, 3, 5, 8, 9], [4, 3, 2, 1, 0, 7, 6]])
ALIKE = ([APART[0][0]], [APART[1][0]])
TERMS: dict[str, Callable[[], Written]] = {
    **{str(shape): lambda shape=shape: _dense(*shape) for shape in itertools.product((1, B), (1, H), (1, L), (1, S))},
    "by distance": lambda: _distances(1, H, 1, T),
    "by distance, one for all": lambda: _distances(1, 1, 1, T, first=-3),
    "by distance, of each item": lambda: _distances(B, H, 1, T, first=2),
    "by distance, of each query": lambda: _distances(B, H, L, T, first=2),
    "by distance, of each query for all": lambda: _distances(1, 1, L, T),
    "by distance, only one": lambda: _distances(1, H, L, 1),
    "at places": lambda: _distances(1, H, 1, T, at=ALIKE),
    "at places of each item": lambda: _distances(1, H, 1, T, at=APART),
    "at places of each item, apart": lambda: _distances(B, 1, 1, T, at=APART),
    "at places of queries": lambda: _distances(1, H, 1, T, at=(APART[0], ALIKE[1])),
    "at places of each query": lambda: _distances(B, H, L, T, at=APART),
    "at places of each item, of each query for all": lambda: _distances(1, 1, L, T, at=APART),
    "at places of each query, alike": lambda: _distances(1, 1, L, T, at=ALIKE),
    "hiding": lambda: _hiding(None),
    "hiding of a tensor": lambda: _hiding(_dense(1, H, L, 1)),
    "hiding of distances": lambda: _hiding(_distances(1, H, 1, T, first=1)),
}


def _tiles() -> Iterator[Tile]:
    draw = random.Random(0)
    yield Tile(slice(0, B), slice(0, H), range(L), (ColumnRange(range(S), True),), Full())
    yield Tile(slice(0, B), slice(0, H), range(0, L, 2), (ColumnRange(range(1, 6), True),), Full())
    for _ in range(12):
        step = draw.choice([1, 1, 2])
        batch, heads = (slice(start := draw.randrange(size), draw.randint(start + 1, size)) for size in (B, H))
        edges = sorted(draw.sample(range(S + 1), draw.choice([2, 4])))
        strips = tuple(ColumnRange(range(*pair, step), True) for pair in zip(edges[::2], edges[1::2], strict=True))
        yield Tile(batch, heads, range(draw.randrange(2), draw.randint(2, L), step), strips, Full())


def _part(whole: Tensor, tile: Tile) -> Tensor:
    columns = [key for span in tile.spans for key in span]
    return whole[tile.batch, tile.heads][:, :, list(tile.rows)][..., columns]


@pytest.mark.parametrize("name", TERMS)
def test_a_tile_is_its_part_of_the_matrix(name: str) -> None:
    term, whole = TERMS[name]()
    others = () if name == "hiding" else (torch.randn_like(term.source),)  # there is nothing to read elsewhere
    for source in (term.source, *others):
        own, expected = term.of(source), whole(source)
        for tile in _tiles():
            part = _part(expected, tile)
            torch.testing.assert_close(own.read(tile).expand_as(part), part)


@pytest.mark.parametrize("name", TERMS)
def test_entries_are_those_of_the_matrix(name: str) -> None:
    term, whole = TERMS[name]()
    places = torch.tensor(_pairs()).T
    torch.testing.assert_close(term.at(*places), whole(term.source).flatten())
    b, h, q, kv = (
        torch.arange(size).view([-1 if i == axis else 1 for i in range(4)]) for axis, size in enumerate(SIZES[:4])
    )
    torch.testing.assert_close(term.at(b, h, q, kv).expand(SIZES[:4]), whole(term.source))


@pytest.mark.parametrize("name", TERMS)
def test_rows_in_another_order_take_their_entries_along(name: str) -> None:
    term, whole = TERMS[name]()
    rows = torch.tensor([3, 0, 4, 1, 2])
    for tile in _tiles():
        part = _part(whole(term.source)[:, :, rows], tile)
        torch.testing.assert_close(term.permuted(rows, S).read(tile).expand_as(part), part)


@pytest.mark.ci
@pytest.mark.parametrize("name", [name for name in TERMS if "hiding" not in name])
def test_gradients_of_tiles_add_up_to_that_of_the_source(name: str) -> None:
    term, whole = TERMS[name]()
    source = term.source.clone().requires_grad_()
    total, expected = torch.zeros_like(term.source), torch.zeros_like(term.source)
    for tile in _tiles():
        part = _part(whole(source), tile)
        grad = torch.randn(part.shape, dtype=torch.float64)
        expected += torch.autograd.grad(part, source, grad)[0]
        term.accumulate_gradient(total, tile, grad)
        torch.testing.assert_close(total, expected)


def test_a_table_of_two_queries_is_read_at_their_rows() -> None:
    source = torch.arange(8.0).view(1, 1, 2, 4)
    tile = Tile(slice(0, 1), slice(0, 1), range(2), (ColumnRange(range(3), True),), Full())
    want = torch.tensor([[2.0, 1.0, 0.0], [7.0, 6.0, 5.0]])
    torch.testing.assert_close(DistanceTerm(source, -2, 0).read(tile)[0, 0], want)


def test_two_heads_and_two_queries_have_separate_entries() -> None:
    source = torch.arange(8.0).view(1, 2, 2, 2)
    one = Tile(slice(0, 1), slice(1, 2), range(2), (ColumnRange(range(2), True),), Full())
    assert DenseTerm(source).read(one).flatten().tolist() == [4.0, 5.0, 6.0, 7.0]
    assert DenseTerm(source).read(one._replace(rows=range(1, 2))).flatten().tolist() == [6.0, 7.0]
    last = one._replace(columns=(ColumnRange(range(1, 2), True),))
    assert DenseTerm(source).read(last).flatten().tolist() == [5.0, 7.0]
    other = DenseTerm(source).permuted(torch.tensor([1, 0]), 2)
    assert other.read(one).flatten().tolist() == [6.0, 7.0, 4.0, 5.0]


@pytest.mark.parametrize("impl", ["reference", "tiled", "fused", "matmul"])
def test_distances_are_those_of_the_positions(impl: str) -> None:
    query, key = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8)
    rows, columns = range(10, 14), range(9, 15)
    matrix = sc.AttentionMatrix(query, key, bias=positions.ALiBi(2), q_positions=rows, kv_positions=columns, impl=impl)
    distance = torch.tensor([[abs(q - kv) for kv in columns] for q in rows])
    slopes = torch.tensor([2.0**-4, 2.0**-8])[:, None, None]
    want = (query @ key.mT / 8**0.5 - slopes * distance).softmax(-1)
    torch.testing.assert_close(matrix @ torch.eye(6).expand(1, 2, 6, 6), want)


@pytest.mark.parametrize("lengths", [(0, 3), (3, 0), (0, 0)], ids=str)
def test_empty_inputs_have_no_distances(lengths: tuple[int, int]) -> None:
    query, key = (torch.randn(2, 2, length, 8) for length in lengths)
    places = [torch.arange(length).repeat(2, 1) * 2 for length in lengths]
    matrix = sc.AttentionMatrix(query, key, bias=positions.ALiBi(2), q_positions=places[0], kv_positions=places[1])
    assert (matrix @ key).shape == query.shape
    assert not (matrix @ key).any()


def test_tables_are_as_wide_as_scores() -> None:
    class Short(positions.Bias):
        def values(self, distance: Tensor, query: Tensor, scale: float) -> Tensor:
            return distance.to(query.dtype).view(1, 1, 1, -1)

    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2):
        query = torch.randn(1, 2, 4, 8, dtype=dtype)
        matrix = sc.AttentionMatrix(query, query, bias=Short())
        assert matrix.inputs.bias.source.dtype == wide


BRAIN, HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64
WIDTHS = [(BRAIN, BRAIN, BRAIN), (BRAIN, HALF, SINGLE), (BRAIN, SINGLE, SINGLE), (BRAIN, DOUBLE, SINGLE)]
WIDTHS += [(SINGLE, BRAIN, SINGLE), (SINGLE, SINGLE, SINGLE), (SINGLE, DOUBLE, SINGLE)]
WIDTHS += [(DOUBLE, BRAIN, DOUBLE), (DOUBLE, SINGLE, DOUBLE), (DOUBLE, DOUBLE, DOUBLE)]


@pytest.mark.parametrize("dtype, given, held", WIDTHS, ids=str)
def test_a_tensor_is_held_as_queries_are_or_as_wide_as_scores(
    dtype: torch.dtype, given: torch.dtype, held: torch.dtype
) -> None:
    query = torch.randn(1, 2, 4, 8, dtype=dtype)
    matrix = sc.AttentionMatrix(query, query, bias=torch.zeros(4, 4, dtype=given))
    assert matrix.inputs.bias.source.dtype == held
