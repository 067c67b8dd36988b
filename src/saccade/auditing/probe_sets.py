"""Select sets of tokens to change and sets of rows to test, so that an audit covers many pairs with few runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.auditing.reachability import Reach

LONG = 511
"""Number of tokens above which an audit does not count pairs and computes fewer gradients, because passes are slow."""
GRADIENT_SETS = 2
"""Number of sets of rows whose gradients are computed for inputs longer than `LONG`, to limit backward passes.

Each set costs about two forward passes.
"""


class Rows(NamedTuple):
    """A set of output rows to test together, and their sources: the tokens that may influence them.

    No two rows have a source in common.

    Attributes:
        rows: the output rows, bool ``[batch, length]``.
        sources: the tokens that may influence any of the rows.
    """

    rows: Tensor
    sources: Tensor


def separating_sets(reach: Reach) -> Iterator[Tensor]:
    """Yield sets of tokens that separate components: for any two components, some set contains one but not the other.

    Each component is contained in a different half of the k sets (Sperner 1928), so k is about log2 of the number of
    components.
    """
    label, count = reach.components()
    if count < 2:
        return
    tests = next(k for k in itertools.count(2) if math.comb(k, k // 2) >= count)
    codes = list(itertools.islice(itertools.combinations(range(tests), tests // 2), count))
    for test in range(tests):
        yield torch.tensor([test in code for code in codes])[label]


def row_sets(reach: Reach, checked_rows: Tensor, tests: int, seed: int, borders: Sequence[int] = ()) -> Iterator[Rows]:
    """Yield sets of rows to test. Each set collects rows with disjoint sources, starting from one row.

    The first row of a set is at an edge or at a random position. The rows ``borders`` of the first item come first.
    """
    draw = torch.Generator().manual_seed(seed)
    edges = _edges(reach, checked_rows)
    edges = [edges[position] for position in torch.randperm(len(edges), generator=draw).tolist()]
    edges = [(0, position) for position in borders if checked_rows[0, position]] + edges
    positions = checked_rows.nonzero().tolist()
    for test in range(tests if positions else 0):
        if test % 3 == 0 and test // 3 < len(edges):
            item, first = edges[test // 3]
        else:
            item, first = positions[int(torch.randint(len(positions), (), generator=draw))]
        yield _row_set(reach, checked_rows, item, first)


def _edges(reach: Reach, checked_rows: Tensor) -> list[tuple[int, int]]:
    """Return the rows where errors are likely, at the ends of texts and components and beside tile borders."""
    label, _ = reach.components()
    between = label[:, 1:] != label[:, :-1]
    end = torch.ones(len(label), 1, dtype=torch.bool)
    is_edge = torch.cat([end, between], 1) | torch.cat([between, end], 1)
    position = torch.arange(label.shape[1])
    is_edge |= (position % 64 == 0) | (position % 64 == 63)
    return [(item, position) for item, position in (checked_rows & is_edge).nonzero().tolist()]


def _row_set(reach: Reach, checked_rows: Tensor, item: int, first: int) -> Rows:
    batch, length = reach.shape
    rows = reach.one(item, first)
    taken = reach.sources(rows)
    where = taken[item].nonzero()
    step = int(where.max() - where.min()) + 2 if len(where) else 2
    for other, position in itertools.product(range(batch), range(first % step, length, step)):
        if not checked_rows[other, position]:
            continue
        own = reach.sources(reach.one(other, position))
        if not bool((taken & own).any()):
            rows[other, position] = True
            taken = taken | own
    return Rows(rows, taken)


def bisect(tokens: Tensor, shows: Callable[[Tensor], bool]) -> tuple[int, int]:
    """Bisect a set of tokens to find one for which ``shows`` is True, with log2(number of tokens) calls."""
    while int(tokens.sum()) > 1:
        positions = tokens.flatten().nonzero()[: (int(tokens.sum()) + 1) // 2, 0]
        half = torch.zeros_like(tokens).flatten().index_fill(0, positions, True).view_as(tokens)
        tokens = half if shows(half) else tokens & ~half
    item, position = tokens.nonzero()[0].tolist()
    return item, position
