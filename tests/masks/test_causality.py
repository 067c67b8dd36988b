"""Tests of whether a mask sees later keys, against every later key one by one."""

import pytest
import torch
from tests.masks import brute_force
from tests.masks.test_masks import ATOMS

from saccade import masks
from saccade.masks.causality import sees_later

FEW = torch.tensor([[3, 4, -1], [0, 1, 2]])
PLACES = [range(1), range(4), range(2, 5), range(8, 9), torch.tensor([4, 0, 2]), FEW, torch.tensor([[-1, -1], [5, -1]])]
MORE = [
    masks.Window(0, 1) & masks.Prefix(5),
    masks.Causal() | masks.Global([6], sees=False),
    masks.Documents([5, 40]),
    masks.Documents([5, 40], rule=masks.Causal()),
    masks.PerItem([masks.Causal(), masks.Window(1, 2)]),
    masks.PerItem([masks.Window(1, 2), masks.Causal()]),
    masks.Predicate(lambda b, h, q, kv: kv <= q),
    masks.Predicate(lambda b, h, q, kv: (kv <= q) | (kv == 20)),
    masks.Predicate(lambda b, h, q, kv: (kv <= q) | (kv == q + 63)),
    masks.Predicate(lambda b, h, q, kv: (kv <= q) | ((b == 1) & (kv == q + 3))),
    ~masks.Predicate(lambda b, h, q, kv: kv >= q - 1) | masks.Causal(),
]


def _rows(mask: masks.Mask, positions: range | torch.Tensor) -> list[list[int]]:
    """Return the positions of each item's tokens."""
    table = torch.tensor(list(positions))[None] if isinstance(positions, range) else torch.atleast_2d(positions)
    return [[at for at in row if at >= 0] for row in table.expand(max(len(table), mask.shape[0]), -1).tolist()]


@pytest.mark.parametrize("positions", PLACES, ids=str)
@pytest.mark.parametrize("mask", [*ATOMS, *MORE], ids=str)
def test_a_rule_sees_later_keys_where_one_of_them_is_allowed(mask: masks.Mask, positions: range | torch.Tensor) -> None:
    allows = brute_force.rule(mask)
    expected = any(
        allows(b, q, kv) for b, row in enumerate(_rows(mask, positions)) for q in row for kv in range(max(row) + 1, 75)
    )
    assert sees_later(mask, positions) == expected


def test_heads_are_asked_apart() -> None:
    layout = torch.ones(2, 3, 3, dtype=torch.bool).tril()
    assert not sees_later(masks.Blocks(layout, 2), range(2))
    layout[1, 0, 2] = True
    assert sees_later(masks.Blocks(layout, 2), range(2))
    per_head = masks.Predicate(lambda b, h, q, kv: kv <= q + h)
    assert not sees_later(per_head, range(4))  # of one head, unless the rule says that it tells them apart
    assert sees_later(masks.Blocks(torch.ones(2, 40, 40, dtype=torch.bool), 1) & per_head, range(4))


def test_far_keys_are_sampled_too() -> None:
    assert sees_later(masks.Predicate(lambda b, h, q, kv: (kv <= q) | (kv > 1 << 30)), range(4))
    assert sees_later(masks.Predicate(lambda b, h, q, kv: (kv <= q) | ((q == 0) & (kv == 99))), range(99))
    assert sees_later(masks.Predicate(lambda b, h, q, kv: (kv <= q) | ((q == 98) & (kv == 99))), range(99))


def test_no_rule_sees_all_later_keys_without_queries() -> None:
    assert sees_later(None, range(3))
    assert sees_later(None, range(1))
    assert sees_later(None, torch.zeros(1, 1, dtype=torch.int64))
    assert sees_later(None, torch.zeros(1, 2, dtype=torch.int64))
    assert not sees_later(None, range(0))
    assert not sees_later(None, torch.zeros(1, 0, dtype=torch.int64))
    assert not sees_later(masks.Full(), range(0))
    assert not sees_later(masks.Full(), torch.full((2, 3), -1))


@pytest.mark.parametrize("later", [0, 1])
def test_bounds_of_each_item_decide_for_per_item_masks(later: int) -> None:
    """A single later key decides for one item, even between the keys that a sample would hold."""
    rules = [masks.Causal(), masks.Causal()]
    rules[later] = masks.Causal() | masks.Global([1000], sees=False)
    assert sees_later(masks.PerItem(rules), range(4))
