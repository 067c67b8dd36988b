"""Terms of the bias: any tile of one, and its gradient, are those of the whole matrix written out pair by pair."""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from saccade.engine.bias_terms import DenseTerm, HidingTerm, Term
from saccade.engine.distance_bias import DistanceTerm
from saccade.masks import Full
from saccade.plan import Strip, Tile

SIZES = (2, 4, 7, 9)  # batch, heads, q_len, kv_len
ROWS = [range(7), range(2, 5), range(1, 7, 2), range(3, 4)]
COLUMNS = [(range(9),), (range(2, 5), range(6, 9)), (range(1, 9, 2),), (range(0, 4, 2), range(5, 6)), (range(4, 5),)]


def numbers(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def tiles() -> Iterator[Tile]:
    boxes = [(slice(0, 2), slice(0, 4)), (slice(1, 2), slice(2, 4)), (slice(0, 1), slice(3, 4))]
    for number, (rows, columns) in enumerate(itertools.product(ROWS, COLUMNS)):
        yield Tile(*boxes[number % 3], rows, tuple(Strip(span, True) for span in columns), Full())


def part_of(x: Tensor, tile: Tile) -> Tensor:
    columns = [column for span in tile.spans for column in span]
    return x[tile.batch, tile.heads][:, :, list(tile.rows)][..., columns]


def places() -> tuple[Tensor, ...]:
    """Batch item, head, query and key of every pair."""
    return torch.meshgrid(*(torch.arange(n) for n in SIZES), indexing="ij")


ADDRESSES = {
    "one by one": (None, None),
    "of all": (torch.tensor([[0, 2, 2, 5, 9, -1, 3]]), torch.tensor([[1, 0, 4, 4, 8, 9, -1, 2, 3]])),
    "of each": (
        torch.tensor([[0, 1, 2, 3, 4, 5, 6], [4, 4, 1, 0, 8, 3, 2]]),
        torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8], [2, 7, 1, 0, 3, 3, 9, 5, 4]]),
    ),
    "of each query": (torch.tensor([[0, 1, 2, 3, 4, 5, 6], [4, 4, 1, 0, 8, 3, 2]]), torch.arange(9)[None]),
    "of each key": (torch.arange(7)[None], torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8], [2, 7, 1, 0, 3, 3, 9, 5, 4]])),
}


def written_out(source: Tensor, lowest: int, first: int, q: Tensor | None, kv: Tensor | None) -> Tensor:
    """A table of distances, read pair by pair."""
    items, heads, rows, room = source.shape

    def place(b: int, h: int, i: int, j: int) -> int:
        own = i + first if q is None else int(q[b % len(q), i])
        other = j if kv is None else int(kv[b % len(kv), j])
        distance = min(max(own - other - lowest, 0), room - 1)
        return ((b % items * heads + h % heads) * rows + i % rows) * room + distance

    every = [place(*pair) for pair in itertools.product(*map(range, SIZES))]
    return source.flatten()[torch.tensor(every)].view(SIZES)


def agrees(term: Term, source: Tensor, whole: Tensor) -> None:
    """Tiles, single pairs, rows in another order, and gradients are those of the whole."""
    assert torch.equal(term.at(*places()), whole)
    order = torch.tensor([5, 0, 3, 1, 6, 2, 4])
    ordered = term.in_order(order, SIZES[3])
    for tile in tiles():
        want = part_of(whole, tile)
        assert torch.equal(term.read(tile).expand(want.shape), want)
        assert torch.equal(ordered.read(tile).expand(want.shape), part_of(whole[:, :, order], tile))
        assert torch.equal(term.of(2 * source).read(tile).expand(want.shape), 2 * want)
        weights = numbers(*want.shape)
        (wanted,) = torch.autograd.grad(want[want != -math.inf], source, weights[want != -math.inf], retain_graph=True)
        found = torch.ones_like(source)  # what is there stays
        term.collect(found, tile, weights.masked_fill(want == -math.inf, 0.0))
        torch.testing.assert_close(found - 1.0, wanted)


@pytest.mark.parametrize("sizes", [SIZES, (1, 4, 7, 9), (2, 1, 1, 9), (2, 4, 7, 1), (1, 1, 1, 1), (1, 1, 7, 9)])
def test_a_tensor_that_broadcasts(sizes: tuple[int, ...]) -> None:
    source = numbers(*sizes).requires_grad_()
    agrees(DenseTerm(source), source, source.expand(SIZES))


@pytest.mark.parametrize("sizes", [(1, 4, 1), (2, 1, 1), (1, 1, 7), (2, 4, 7), (1, 1, 1)])
@pytest.mark.parametrize("name", ADDRESSES)
def test_a_table_of_distances(sizes: tuple[int, ...], name: str) -> None:
    q, kv = ADDRESSES[name]
    lowest, first = (-3, 2) if q is None else (-5, 0)
    source = numbers(*sizes, 8).requires_grad_()  # at distances beyond its ends the value at the end
    agrees(DistanceTerm(source, lowest, first, q, kv), source, written_out(source, lowest, first, q, kv))


def test_a_term_of_which_rows_and_columns_are_hidden() -> None:
    queries, keys = torch.zeros(SIZES[:3], dtype=torch.bool), torch.zeros(2, 4, 9, dtype=torch.bool)
    queries[0, 1, 2] = queries[1, 3, 4] = keys[1, 2, 3] = keys[0, 0, 8] = True
    hidden, nothing = queries[..., None] | keys[:, :, None], torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    source = numbers(1, 4, 7, 9).requires_grad_()
    whole = source.expand(SIZES).masked_fill(hidden, -math.inf)
    agrees(HidingTerm(DenseTerm(source), queries, keys, nothing), source, whole)
    alone, zeros = HidingTerm(None, queries, keys, nothing), torch.zeros(SIZES, dtype=torch.float64)
    assert torch.equal(alone.at(*places()), zeros.masked_fill(hidden, -math.inf))
    for tile in tiles():
        assert torch.equal(alone.read(tile), part_of(zeros.masked_fill(hidden, -math.inf), tile))
