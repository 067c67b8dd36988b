"""Relations of the nodes of a graph: kinds of edges, lengths of paths, and what attention makes of them."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.nn import MultiHeadAttention
from saccade.positions import RelationTable, path_lengths

SIZES = (7, 4, 1)


def graphs(one_way: bool = False) -> Tensor:
    """Kinds of edges, int64 [batch, n, n], of graphs of different sizes: 0 for none."""
    generator = torch.Generator().manual_seed(3)
    kinds = torch.zeros(len(SIZES), max(SIZES), max(SIZES), dtype=torch.int64)
    for own, size in zip(kinds, SIZES, strict=True):
        drawn = torch.randint(1, 4, (size, size), generator=generator)
        drawn[torch.rand(size, size, generator=generator) < 0.7] = 0
        own[:size, :size] = drawn.triu(1) if one_way else drawn.triu(1) + drawn.triu(1).T
    return kinds


def floyd(edges: Tensor, reach: int) -> list[list[int]]:
    """Lengths of shortest paths by Floyd and Warshall, on plain ints."""
    n, far = len(edges), reach + 1
    length = [[0 if i == j else 1 if edges[i, j] else 10**6 for j in range(n)] for i in range(n)]
    for k in range(n):
        for i in range(n):
            for j in range(n):
                length[i][j] = min(length[i][j], length[i][k] + length[k][j])
    return [[min(x, far) for x in row] for row in length]


@pytest.mark.parametrize("one_way", [False, True])
@pytest.mark.parametrize("reach", [1, 2, 5, 30])
def test_lengths_of_shortest_paths(reach: int, one_way: bool) -> None:
    edges = graphs(one_way) > 0
    assert path_lengths(edges, reach).tolist() == [floyd(own, reach) for own in edges]
    assert path_lengths(edges[:0], reach).shape == (0, 7, 7)
    assert path_lengths(edges[:, :0, :0], reach).shape == (3, 0, 0)


def by_definition(query: Tensor, key: Tensor, value: Tensor, tables: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Graphormer's attention in one graph after another, with its own nodes alone."""
    out = torch.zeros_like(value)
    for b, size in enumerate(SIZES):
        for h in range(query.shape[1]):
            for i in range(size):
                scores = key[b, h, :size] @ query[b, h, i] / query.shape[-1] ** 0.5
                for weight, relations in tables:
                    known = relations[b, i, :size]
                    scores = scores + torch.where(known < 0, 0.0, weight[known, h])
                out[b, h, i] = scores.softmax(0) @ value[b, h, :size]
    return out


def test_bonds_and_paths_are_graphormer_s() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, 2, 7, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    kinds = graphs()
    bonds, apart = RelationTable(2, 3).double(), RelationTable(2, 5).double()
    relations = [(bonds, kinds - 1), (apart, path_lengths(kinds > 0, reach=3))]
    wanted = [query, key, value, bonds.weight, apart.weight]
    for table in (bonds, apart):
        torch.nn.init.normal_(table.weight)
    bias = sum(table(own) for table, own in relations)
    out = sc.attention(query, key, value, masks.Padding(SIZES), bias=bias)
    expected = by_definition(query, key, value, [(table.weight, own) for table, own in relations])
    real = torch.arange(7) < torch.tensor(SIZES)[:, None, None]
    torch.testing.assert_close(out * real[..., None], expected)
    upstream = torch.randn_like(out) * real[..., None]
    own, want = (torch.autograd.grad((x * upstream).sum(), wanted) for x in (out, expected))
    for one, other in zip(own, want, strict=True):
        torch.testing.assert_close(one, other)
    read = sc.attention(
        query,
        key,
        value,
        masks.Padding(SIZES),
        score=lambda score, b, h, q, kv: score + apart.weight[relations[1][1][b, q, kv], h],
        bias=bonds(relations[0][1]),
    )
    torch.testing.assert_close(read * real[..., None], expected)  # as the docstring has it


def test_a_layer_takes_it_and_shows_it() -> None:
    torch.manual_seed(0)
    layer, table, x = MultiHeadAttention(8, 2), RelationTable(2, 5), torch.randn(3, 7, 8)
    apart = path_lengths(graphs() > 0, reach=3)
    facts = {"mask": masks.Padding(SIZES), "bias": table(apart)}
    torch.testing.assert_close(layer(x, **facts), layer(x, mask=masks.Padding(SIZES)))  # all start at 0
    with torch.no_grad():
        table.weight[1:] = -torch.inf  # nobody but itself
    weights = layer.matrix(x, mask=masks.Padding(SIZES), bias=table(apart)).to_dense()
    for b, size in enumerate(SIZES):
        torch.testing.assert_close(weights[b, :, :size, :size], torch.eye(size).expand(2, -1, -1))
    table.reset_parameters()
    assert table.weight.eq(0).all()
    assert str(table) == "RelationTable(2, num_relations=5)"


def test_unrelated_pairs_get_no_gradient() -> None:
    table, relations = RelationTable(2, 3), torch.tensor([[[-1, 0], [2, -1]]], dtype=torch.int32)
    table(relations).sum().backward()
    assert table.weight.grad.tolist() == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: RelationTable(0, 3), "RelationTable: num_heads must be an int of at least 1; got 0."),
        (lambda: RelationTable(2, 1.5), "RelationTable: num_relations must be an int of at least 1; got 1.5."),
        (
            lambda: RelationTable(2, 3)(torch.zeros(2, 2).long()),
            "RelationTable: relations must have shape [batch, q_len, kv_len]; got [2, 2].",
        ),
        (
            lambda: RelationTable(2, 3)(torch.zeros(1, 2, 2)),
            "RelationTable: relations must be int64 or int32; got float32.",
        ),
        (
            lambda: RelationTable(2, 3)(torch.full((1, 2, 2), 3)),
            "RelationTable: relations must be from -1 to 2; got other numbers.",
        ),
        (lambda: path_lengths(graphs(), 2), "path_lengths: edges must be a bool tensor; got int64."),
        (lambda: path_lengths(graphs() > 0, 0), "path_lengths: reach must be an int of at least 1; got 0."),
        (
            lambda: path_lengths(graphs()[0] > 0, 2),
            "path_lengths: edges must have shape [batch, n, n]; got [7, 7].",
        ),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        call()
