"""Bounds, residuals and slices of a mask at given positions agree with its pairs, one by one."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.masks.bounds_by_key import universe_of, written

import saccade as sc
from saccade import masks
from saccade.engine.positions import positioned_mask
from saccade.engine.positions.position_index import TokenOrder
from saccade.engine.positions.positioned_mask import PositionedMask
from saccade.plan import ALL, Box, Groups

LEN = 8
TABLES = {
    "in order": ([[0, 1, 2, 3, 4, 5, 6, 7]], [[0, 1, 2, 3, 4, 5, 6, 7]]),
    "moved": ([[3, 4, 5, 6, 7, 8, 9, 10]], [[2, 3, 4, 5, 6, 7, 8, 9]]),
    "padded": (
        [[-1, -1, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, -1]],
        [[-1, -1, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, -1]],
    ),
    "holes": (
        [[0, 1, -1, 2, 3, -1, 4, 5], [-1, 0, -1, 1, -1, 2, -1, 3]],
        [[0, -1, -1, 1, 2, 3, -1, 4], [-1, -1, 3, 4, 5, 6, 7, 8]],
    ),
    "gaps and repetitions": (
        [[0, 0, 2, 2, 2, 7, 9, 9], [1, 2, 3, 5, 5, 5, 6, 8]],
        [[0, 1, 1, 1, 4, 7, 8, 9], [0, 2, 4, 6, 6, 6, 7, 9]],
    ),
    "nobody": ([[-1] * 8, [0, 1, 2, 3, 4, 5, 6, 7]], [[0, 1, 2, 3, 4, 5, 6, 7], [-1] * 8]),
    "queries alike": ([[0, 1, 2, 3, 4, 5, 6, 7]], [[0, 1, 2, 3, -1, -1, 4, 5], [2, 3, 4, 5, 6, 7, 8, 9]]),
    "keys alike": ([[0, 1, 2, 3, -1, -1, 4, 5], [2, 3, 4, 5, 6, 7, 8, 9]], [[0, 1, 2, 3, 4, 5, 6, 7]]),
    "far apart": (
        [[-1, 0, 1, 2, 3, 4, 5, 6], [4, 5, 6, 7, 8, 9, 10, 11]],
        [[-1, 0, 1, 2, 3, 4, 5, 6], [4, 5, 6, 7, 8, 9, 10, 11]],
    ),
}
MASKS = [
    masks.Full(),
    masks.Causal(),
    masks.Causal() & masks.Window(2, 0),
    masks.Window(1, 2) | masks.Global([0]),
    masks.Strided(2),
    masks.Segments(3, 1),
    masks.Documents([4, 8]),
    masks.Padding([3, 6]),
    masks.PerItem([masks.Causal(), masks.Window(1, 1)]),
    masks.Predicate(lambda b, h, q, kv: (q + kv + b) % 3 == 0) & masks.Causal(),
]
ITEMS = [ALL, 0, 1]
GROUPS = [(first, last) for first in range(LEN) for last in range(first, LEN)]


@pytest.fixture(autouse=True)
def _tables_are_always_looked_at(monkeypatch):
    monkeypatch.setattr(positioned_mask, "_FEWEST", 0)


def _made(mask, name: str) -> tuple[PositionedMask, np.ndarray]:
    """Return the mask at these positions, and its pairs, bool [2, rows, keys]."""
    q, kv = (torch.tensor(table) for table in TABLES[name])
    own_q, own_kv = (x.expand(2, -1) for x in (q, kv))
    at, to = own_q[:, None, :, None], own_kv[:, None, None]
    allowed = mask.allows(torch.arange(2)[:, None, None, None], torch.zeros((), dtype=torch.int64), at, to)
    table = ((at >= 0) & (to >= 0) & allowed)[:, 0].numpy()
    return PositionedMask(mask, q, kv), table


def _items(batch: int) -> slice:
    return slice(None) if batch == ALL else slice(batch, batch + 1)


@pytest.mark.ci
@pytest.mark.parametrize("universe", [(0, LEN), (2, 7)], ids=str)
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_bounds_hold_what_some_row_needs_and_nothing_that_one_lacks(mask, name, universe):
    rule, table = _made(mask, name)
    columns = range(*universe)
    batches = [*ITEMS, "each"]
    for batch in batches:
        own = np.arange(len(GROUPS)) % 2 if batch == "each" else np.full(len(GROUPS), batch)
        firsts, lasts = np.asarray(GROUPS).T
        few = (lasts - firsts) < 2
        for chosen in (slice(None), few, few & (own == own[0])):  # few rows of all items get one range
            groups = Groups(own[chosen], firsts[chosen], lasts[chosen])
            bounds = rule.bounds(groups, universe_of(universe, len(groups.first)))
            any_row, all_rows = written(bounds.any_row, universe), written(bounds.all_rows, universe)
            for item, first, last, some, every in zip(*groups[:3], any_row, all_rows, strict=True):
                part = table[_items(item), first : last + 1, columns.start : columns.stop]
                assert not (part.any((0, 1)) & ~some).any(), "a key that is needed is left out"
                assert not (every & ~part.all((0, 1))).any(), "a key that is sure is not allowed"
                assert not (every & ~some).any()


@pytest.mark.parametrize("name", ["in order", "moved", "padded", "far apart"])
def test_rows_of_one_item_need_what_the_mask_says_and_no_more(name):
    rule, table = _made(masks.Causal() & masks.Window(2, 0), name)
    for item in range(2):
        rows = np.arange(LEN)
        groups = Groups(np.full(LEN, item), rows, rows)
        bounds = rule.bounds(groups, universe_of((0, LEN), LEN))
        assert np.array_equal(written(bounds.any_row, (0, LEN)), table[item])
        assert np.array_equal(written(bounds.all_rows, (0, LEN)), table[item])


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("mask", [masks.Full(), masks.Window(1, 2)], ids=str)
def test_a_key_that_one_row_lacks_is_not_sure_for_the_group(mask, name):
    rule, table = _made(mask, name)
    for item in ITEMS:
        for first, last in GROUPS:
            bounds = rule.bounds(Groups(*(np.array([x]) for x in (item, first, last))), universe_of((0, LEN), 1))
            part = table[_items(item), first : last + 1]
            assert not (written(bounds.all_rows, (0, LEN))[0] & ~part.all((0, 1))).any()
            assert not (part.any((0, 1)) & ~written(bounds.any_row, (0, LEN))[0]).any()


def _boxes() -> Iterator[tuple[range, range]]:
    draw = random.Random(0)
    for _ in range(150):
        step = draw.choice([1, 1, 1, 2, 3])
        rows, keys = (sorted(draw.sample(range(LEN + 1), 2)) for _ in range(2))
        yield range(*rows, step), range(*keys, step)


@pytest.mark.ci
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_residual_is_the_content_of_its_box(mask, name):
    rule, table = _made(mask, name)
    contents: dict[object, np.ndarray] = {}
    for batch in ITEMS:
        for rows, keys in _boxes():
            part = table[_items(batch)][:, list(rows)][:, :, list(keys)]
            partial = rule.partial(Box(batch, rows, keys))
            if isinstance(partial, bool):
                assert (part == partial).all()
            elif batch != ALL:
                assert np.array_equal(contents.setdefault(partial, part), part)


def test_equal_boxes_of_different_rules_are_not_taken_for_each_other():
    box = Box(ALL, range(4), range(4))
    one, other = (_made(mask, "holes")[0] for mask in (masks.Causal(), masks.Window(1, 1)))
    assert one.partial(box) != other.partial(box)
    assert one.partial(box) == one.partial(box)


def test_tokens_in_a_row_are_as_well_known_as_their_positions():
    rule, _ = _made(masks.Causal(), "far apart")
    for item in range(2):
        assert rule.partial(Box(item, range(1, 4), range(4, 6))) is False
        assert rule.partial(Box(item, range(4, 6), range(1, 4))) is True
        square = rule.partial(Box(item, range(2, 6), range(2, 6)))
        assert square.is_square


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("mask", [masks.Documents([3, 9]), masks.Causal() & masks.Segments(4, 0)], ids=str)
def test_cuts_are_the_first_tokens_behind_those_of_the_mask(mask, name):
    rule, _ = _made(mask, name)
    q = rule.q_positions.numpy()
    asked = set(mask.cuts(ALL, range(12)).tolist())
    for item in range(len(q)):
        found = set(rule.cuts(ALL if len(q) == 1 else item, range(LEN)).tolist())
        tokens = [(index, position) for index, position in enumerate(q[item].tolist()) if position >= 0]
        last = max((position for _, position in tokens), default=-1)
        first = min((position for _, position in tokens), default=0)
        wanted = {min(i for i, at in tokens if at >= cut) for cut in asked if first < cut <= last}
        assert found >= wanted
        edges = {i for i in range(LEN) if (q[item, i] >= 0) != (i > 0 and q[item, i - 1] >= 0)}
        assert found <= wanted | edges | {0, LEN} | {min((i for i, _ in tokens), default=0)}


@pytest.mark.parametrize("table", [[[3, 2, 1, 0]], [[0, 1, 2, 3], [0, 2, 1, 3]], [[1, -1, 0, 2]]])
def test_positions_that_decrease_are_looked_at_pair_by_pair(table):
    assert TokenOrder.of(torch.tensor(table)) is None
    q = torch.tensor(table)
    rule = PositionedMask(masks.Causal(), q, torch.arange(4)[None])
    bounds = rule.bounds(Groups(np.zeros(1, int), np.zeros(1, int), np.zeros(1, int)), universe_of((0, 4), 1))
    assert written(bounds.any_row, (0, 4)).all()
    assert not written(bounds.all_rows, (0, 4)).any()
    assert not isinstance(rule.partial(Box(0, range(2), range(2))), bool)
    assert rule.cuts(0, range(4)).tolist() == []


def test_positions_too_far_for_one_number_are_looked_at_pair_by_pair():
    assert TokenOrder.of(torch.tensor([[0, 1 << 40]])) is not None
    assert TokenOrder.of(torch.tensor([[0, (1 << 40) + 1]])) is None


def test_tokens_with_padding_between_each_two_are_bounded_from_outside():
    q = torch.full((1, 80), -1)
    q[:, ::2] = torch.arange(40)
    rule, rows = PositionedMask(masks.Causal() & masks.Window(3, 0), q, q), np.arange(80)
    bounds = rule.bounds(Groups(np.zeros(80, int), rows, rows), universe_of((0, 80), 80))
    at = q[0].numpy()
    distance = at[:, None] - at
    table = (at[:, None] >= 0) & (at >= 0) & (distance >= 0) & (distance <= 3)
    any_row, all_rows = written(bounds.any_row, (0, 80)), written(bounds.all_rows, (0, 80))
    assert not (table & ~any_row).any()
    assert not (all_rows & ~table).any()
    assert any_row.sum() <= 2 * table.sum()
    assert rule.cuts(0, range(80)).tolist() == []


@pytest.mark.parametrize(
    "places", [range(2, 6), torch.arange(2, 6), torch.tensor([2, 3, 3, 5])], ids=["range", "tensor", "twice"]
)
def test_keys_start_at_the_first_position_by_default(places):
    query, key = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 7, 8)
    rows = torch.tensor(list(places))
    allowed = torch.arange(7) <= rows[:, None]
    want = torch.nn.functional.scaled_dot_product_attention(query, key, key, attn_mask=allowed)
    torch.testing.assert_close(sc.attention(query, key, key, masks.Causal(), q_positions=places), want)


def test_it_tells_apart_what_its_tables_and_its_rule_do():
    one, two = (torch.zeros(items, 4, dtype=torch.int64) for items in (1, 2))
    heads = masks.Blocks(torch.ones(3, 1, 1, dtype=torch.bool), 4)
    for q, kv, rule, shape in (
        (two, one, masks.Causal(), (2, 1)),
        (one, two, masks.Causal(), (2, 1)),
        (one, one, masks.Padding([3, 4]), (2, 1)),
        (one, one, heads, (1, 3)),
    ):
        assert PositionedMask(rule, q, kv).shape == shape
