"""A rule that chooses blocks of keys for each query: its answers are those of a loop over the pairs."""

import dataclasses

import numpy as np
import pytest
import torch

from saccade import masks
from saccade.engine.block_sparse.selected_blocks_mask import SelectedBlocks, at_positions
from saccade.engine.positions.positioned_mask import PositionedMask
from saccade.plan import ALL, Box, Groups
from saccade.plan.key_ranges import KeyDomain

BATCH, HEADS, ROWS, COLUMNS, SLOTS = 2, 4, 5, 11, 3
RULES = {"all": masks.Full(), "causal": masks.Causal(), "window": masks.Window(3, 1)}


def _chosen(rule, size, items, sharing, origin=(0, 0)):
    blocks = -(-COLUMNS // size)
    draw = np.random.default_rng(size + items + sharing)
    index = np.full((items, sharing, ROWS, SLOTS), blocks)
    for where in np.ndindex(index.shape[:3]):
        own = np.sort(draw.choice(blocks, draw.integers(0, min(SLOTS, blocks) + 1), replace=False))
        index[where][: len(own)] = own
    return SelectedBlocks(rule, origin, torch.tensor(index, dtype=torch.int32), size, HEADS, blocks)


def _pairs(chosen):
    """bool [batch, heads, rows, columns], pair by pair."""
    items, sharing = chosen.index.shape[:2]
    table = torch.zeros(BATCH, HEADS, ROWS, COLUMNS, dtype=torch.bool)
    for item, head, row, column in np.ndindex(table.shape):
        own = chosen.index[item if items > 1 else 0, head // (HEADS // sharing), row].tolist()
        place = (torch.tensor(x) for x in (item, head, row + chosen.origin[0], column + chosen.origin[1]))
        table[item, head, row, column] = column // chosen.size in own and bool(chosen.rule.allows(*place))
    return table


CASES = pytest.mark.parametrize(
    ("size", "items", "sharing"), [(1, 1, 1), (1, 2, 2), (2, 2, 1), (3, 1, 2), (4, 2, 4), (3, 2, 2), (11, 1, 1)]
)


@CASES
@pytest.mark.parametrize("origin", [(0, 0), (6, 0), (9, 4)], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_it_allows_what_its_rule_allows_in_the_blocks_of_each_query(name, origin, size, items, sharing):
    chosen = _chosen(RULES[name], size, items, sharing, origin)
    b, h = torch.arange(BATCH)[:, None, None, None], torch.arange(HEADS)[:, None, None]
    q, kv = torch.arange(ROWS)[:, None] + origin[0], torch.arange(COLUMNS) + origin[1]
    wanted = _pairs(chosen)
    assert torch.equal(chosen.allows(b, h, q, kv).expand_as(wanted), wanted)
    for item, head, row, column in ((0, 0, 0, 0), (1, 3, 4, 10), (1, 2, 2, 5)):  # one pair, and pairs side by side
        one = (torch.tensor(x) for x in (item, head, row + origin[0], column + origin[1]))
        assert bool(chosen.allows(*one)) == wanted[item, head, row, column]
    for rows in (torch.arange(ROWS), torch.arange(2) + 1):
        beside = chosen.allows(torch.tensor(1), torch.tensor(2), rows + origin[0], rows + origin[1])
        assert torch.equal(beside, wanted[1, 2, rows, rows])
    turned = (torch.arange(COLUMNS) + torch.arange(ROWS)[:, None]) % COLUMNS  # other keys in each row
    others = chosen.allows(b, h, q, turned + origin[1])
    assert torch.equal(others.expand_as(wanted), wanted.gather(3, turned.expand_as(wanted)))


@CASES
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_keys_that_some_query_reads_are_counted(groups, size, items, sharing):
    chosen = _chosen(masks.Full(), size, items, sharing)
    table = _pairs(chosen)[:items].unflatten(1, (groups, HEADS // groups)).any(2).any(2)
    assert chosen.keys_read(groups, COLUMNS) == int(table.sum())
    for row in range(ROWS):
        step = dataclasses.replace(chosen, index=chosen.index[:, :, row : row + 1])  # a decoding step has one query
        table = _pairs(chosen)[:items, :, row].unflatten(1, (groups, -1)).any(2)
        assert step.keys_read(groups, COLUMNS) == int(table.sum())


@pytest.mark.parametrize("name", RULES)
def test_bounds_and_residuals_are_those_of_the_rule_and_sure_of_nothing(name):
    rule = RULES[name]
    chosen = _chosen(rule, 2, 1, 1)
    rows = np.arange(ROWS)
    groups, keys = Groups(np.full(ROWS, ALL), rows, rows), KeyDomain(np.zeros(ROWS, int), np.full(ROWS, COLUMNS))
    bounds, own = chosen.bounds(groups, keys), rule.bounds(groups, keys)
    assert np.array_equal(bounds.any_row.starts, own.any_row.starts)
    assert np.array_equal(bounds.any_row.ends, own.any_row.ends)
    assert int(bounds.all_rows.sizes().sum()) == 0
    other = _chosen(rule, 2, 1, 1)
    for box in (Box(0, range(2), range(6, 9)), Box(0, range(3, 5), range(2)), Box(0, range(3), range(3))):
        if rule.partial(box) is False:
            assert chosen.partial(box) is False
        else:
            assert chosen.partial(box) not in (True, False)
            assert chosen.partial(box) == chosen.partial(box) != other.partial(box)


def test_the_rule_at_given_positions_is_found_in_it():
    placed = PositionedMask(masks.Causal(), torch.arange(ROWS)[None], torch.arange(COLUMNS)[None])
    assert at_positions(placed) is placed
    assert at_positions(_chosen(placed, 2, 1, 1)) is placed
    assert at_positions(masks.Causal()) is None
    assert at_positions(_chosen(masks.Causal(), 2, 1, 1)) is None


@pytest.mark.parametrize(
    ("items", "sharing", "shape"), [(1, 1, (1, 1)), (2, 1, (2, 1)), (1, 2, (1, 4)), (2, 4, (2, 4))]
)
def test_what_it_tells_apart(items, sharing, shape):
    assert _chosen(masks.Causal(), 2, items, sharing).shape == shape
