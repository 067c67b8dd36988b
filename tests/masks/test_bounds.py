"""Bounds, residuals and terms agree with the rule, on every group of rows and many boxes."""

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.masks import brute_force
from tests.masks.bounds_by_key import universe_of, written
from tests.masks.test_masks import ATOMS

from saccade import masks
from saccade.masks.rules.key_ranges import KeyRanges
from saccade.plan import ALL, Box, Groups, Triangle

FIRST, LEN, BATCH = -3, 12, 2  # rows before position 0 are those of more queries than keys
MORE = [
    masks.Neighborhood(3, 4, 1),
    masks.Neighborhood(2, 4, (0, 2)),
    masks.Axial(4, 3),
    masks.Axial(3, 4, "columns"),
    masks.ShiftedWindows(3, 4, 2, shift=1),
    masks.Neighborhood(2, 3, 1).after(2) | masks.Global([0]),
    masks.Random(3, 2, seed=1),
    masks.Random(1, 4, seed=2) & masks.Causal(),
    masks.Blocks([[True, True], [False, True]], 4),
    masks.Coarse(masks.Global([1]) | masks.Window(0, 0), 3),
    masks.Documents([4, 0, 8], rule=masks.Window(1, 1).after(1)),
    masks.Documents([[5, 2], [3, 3, 6]], rule=masks.Causal() | masks.Prefix(1)),
    masks.PerItem([masks.Strided(2), masks.Causal() & masks.Window(3, 0)]),
    masks.Causal().after(3),
    ~masks.Causal() | masks.Window(0, 0),
    masks.Padding([7, 12]) & ~masks.Segments(4, 2),
    masks.Padding([5]),
    masks.Padding([5], side="left", padded_len=8),
    masks.Segments(2, 1),
    masks.Window(None, 2) & masks.Window(4, None),
    masks.Prefix(5) | masks.Window(1, -1 + 1).after(6),
]


def _ranges(items: int, rows: int, columns: int) -> KeyRanges:
    """Return two ranges of keys for each row, or one, or none."""
    draw = np.random.default_rng(items + rows)
    edges = np.sort(draw.integers(0, columns + 1, (items, rows, 2, 2)).reshape(items, rows, 4), -1)
    starts, ends = edges[..., ::2].copy(), edges[..., 1::2].copy()
    ends[starts >= ends], starts[starts >= ends] = 0, columns
    order = np.argsort(starts, -1, kind="stable")
    return KeyRanges(np.take_along_axis(starts, order, -1), np.take_along_axis(ends, order, -1), columns)


RANGES = [_ranges(1, 5, 9), _ranges(2, 12, 12), _ranges(2, 1, 7), _ranges(1, 1, 10), _ranges(2, 4, 4).after(3)]
RULES = [*ATOMS, *MORE, *RANGES]


def table_of(mask: masks.Mask) -> np.ndarray:
    """Return the pairs, bool [batch, rows from FIRST on, keys]."""
    return brute_force.dense(mask, BATCH, LEN - FIRST, LEN).numpy()


def part_of(table: np.ndarray, batch: int, rows: range, keys: range) -> np.ndarray:
    """Return a part of the table, bool [items, rows, keys]."""
    items = slice(None) if batch == ALL else slice(batch, batch + 1)
    return table[items][:, [row - FIRST for row in rows]][:, :, list(keys)]


@pytest.mark.ci
@pytest.mark.parametrize("universe", [(0, LEN), (2, 9)], ids=str)
@pytest.mark.parametrize("batch", [ALL, 0, 1])
@pytest.mark.parametrize("mask", RULES, ids=str)
def test_bounds_hold_what_some_row_needs_and_nothing_that_one_lacks(
    mask: masks.Mask, batch: int, universe: tuple[int, int]
) -> None:
    table, keys = table_of(mask), range(*universe)
    pairs = [(first, last) for first in range(FIRST, LEN) for last in range(first, LEN)]
    firsts, lasts = np.asarray(pairs).T
    bounds = mask.bounds(Groups(np.full_like(firsts, batch), firsts, lasts), universe_of(universe, len(pairs)))
    any_row, all_rows = written(bounds.any_row, universe), written(bounds.all_rows, universe)
    for (first, last), some, every in zip(pairs, any_row, all_rows, strict=True):
        part = part_of(table, batch, range(first, last + 1), keys)
        assert not (part.any((0, 1)) & ~some).any(), "a key that is needed is left out"
        assert not (every & ~part.all((0, 1))).any(), "a key that is sure is not allowed"
        assert not (every & ~some).any()
        if bounds.is_exact:
            assert np.array_equal(some, part.all((0, 1)))


def _boxes() -> Iterator[tuple[range, range]]:
    """Yield boxes of rows and keys with a step in common, short and long, at the edges and inside."""
    draw = random.Random(0)
    for _ in range(160):
        step = draw.choice([1, 1, 1, 2, 3])
        rows, keys = (sorted(draw.sample(range(first, LEN + 1), 2)) for first in (FIRST, 0))
        yield range(*rows, step), range(*keys, step)
    for row in range(FIRST, LEN):
        yield range(row, row + 1), range(max(row, 0), max(row, 0) + 1)
    for row, key in itertools.product(range(FIRST, LEN - 1), range(LEN - 7)):
        yield range(row, row + 2), range(key, key + 8)


@pytest.mark.ci
@pytest.mark.parametrize("batch", [ALL, 0, 1])
@pytest.mark.parametrize("mask", RULES, ids=str)
def test_a_residual_is_the_content_of_its_box(mask: masks.Mask, batch: int) -> None:
    table, contents = table_of(mask), dict[object, np.ndarray]()
    for rows, keys in _boxes():
        partial, part = mask.partial(Box(batch, rows, keys)), part_of(table, batch, rows, keys)
        if isinstance(partial, bool):
            assert (part == partial).all()
        else:
            assert np.array_equal(contents.setdefault(partial, part), part)
        if isinstance(partial, Triangle):
            triangle = torch.ones(len(rows), len(keys), dtype=torch.bool).tril(partial.offset)
            assert (part == triangle.numpy()).all()


def test_boxes_of_two_functions_are_distinguished() -> None:
    odd, even = (masks.Predicate(lambda b, h, q, kv, rest=rest: (q + kv) % 2 == rest) for rest in (1, 0))
    rule = odd.after(4) | (even & masks.Prefix(4))
    boxes = Box(ALL, range(4, 8), range(4, 8)), Box(ALL, range(4), range(4))
    assert len({odd.partial(boxes[1]), rule.partial(boxes[0])}) == 1
    assert len({rule.partial(box) for box in boxes}) == 2


@pytest.mark.parametrize("mask", RULES, ids=str)
def test_terms_are_disjoint_and_keep_to_their_steps(mask: masks.Mask) -> None:
    times, allowed = torch.zeros(BATCH, 1, LEN, LEN), mask.to_dense(LEN, batch=BATCH)
    distance = torch.arange(LEN)[:, None] - torch.arange(LEN)
    for step, term in mask.terms():
        own = term.to_dense(LEN, batch=BATCH)
        assert not (own & (distance % step != 0)).any()
        times += own
    assert torch.equal(times, allowed.float())


def test_ranges_are_equal_where_they_hold_the_same_keys() -> None:
    one, other = _ranges(2, 12, 12), _ranges(2, 12, 12)
    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other, _ranges(1, 5, 9)}) == 2
    for changed in (
        KeyRanges(one.starts, one.ends, 13),
        KeyRanges(one.starts, np.where(one.ends == one.ends.max(), one.ends - 1, one.ends), 12),
        KeyRanges(np.where(one.starts == 0, 1, one.starts), one.ends, 12),
        masks.Full(),
    ):
        assert one != changed
