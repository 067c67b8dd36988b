"""The plan of a last row holds what the rule says, whichever row of those asked for ahead it is."""

import dataclasses
from collections.abc import Hashable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.masks.random_masks import expressions

from saccade import masks
from saccade.masks.plan_cache import plan_of
from saccade.plan import ALL, Box, Groups
from saccade.plan.decode_plan import RowPlan, RowsAhead
from saccade.plan.key_ranges import Bounds, KeyDomain


def _row(plan: RowPlan, position: int, kv_first: int, kv_len: int) -> torch.Tensor:
    """bool [kv_len], read off the tiles; a key that is allowed in two of them would count twice."""
    row, times = torch.zeros(kv_len, dtype=torch.bool), torch.zeros(kv_len)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    contents: dict[object, torch.Tensor] = {}
    assert plan.overlaps == (len(plan.tiles) > 1)
    for tile in plan.tiles:
        assert list(tile.rows) == [0]
        assert (tile.batch, tile.heads) == (slice(0, plan.shape[0]), slice(0, plan.shape[1]))
        assert [strip.keys.start for strip in tile.columns] == sorted(strip.keys.start for strip in tile.columns)
        for strip in tile.columns:
            assert strip.keys.step == tile.rows.step
            keys = torch.tensor(list(strip.keys))
            asked = tile.rule.allows(zero, zero, zero + position, keys + kv_first).expand(1, 1, 1, len(keys))
            allowed = torch.ones(len(keys), dtype=torch.bool) if strip.partial is True else asked.flatten()
            if strip.partial is not True:
                assert torch.equal(contents.setdefault(strip.partial, allowed), allowed)
            times[keys] += allowed
            row[keys] |= allowed
    assert times.max() <= 1
    return row


ODD = masks.Predicate(lambda b, h, q, kv: (q + kv) % 2 == 0)


@settings(deadline=None)
@example(masks.Window(2, 0) | (masks.Prefix(3) & ODD), 0, 0, 12)  # what is unsure stands before what is sure
@example(masks.Window(2, 0) | (masks.Prefix(3) & ODD), 0, 0, 6)  # what is sure is not all
@given(expressions(1), st.integers(0, 5), st.integers(0, 30), st.integers(1, 30))
def test_every_row_ahead_is_the_rule(mask: masks.Mask, kv_first: int, first: int, ahead: int) -> None:
    first = max(first, kv_first)
    position = first + ahead - 1
    kv_len = position - kv_first + 1
    plan = RowPlan(RowsAhead(mask, first, kv_first, rows=30), position, (3, 2, 1, kv_len))
    expected = mask.to_dense(
        1, kv_len, q_positions=torch.tensor([position]), kv_positions=torch.arange(kv_first, position + 1)
    )
    assert torch.equal(_row(plan, position, kv_first, kv_len), expected[0, 0, 0])
    assert plan.pairs == 6 * sum(len(keys) for tile in plan.tiles for keys in tile.spans)
    assert not plan.is_full or bool(expected.all())


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(0, 5), st.integers(1, 30))
def test_every_so_manieth_key_is_read_and_no_other(step: int, kv_first: int, ahead: int) -> None:
    position = kv_first + ahead - 1
    plan = RowPlan(RowsAhead(masks.Strided(step), kv_first, kv_first, rows=30), position, (1, 1, 1, ahead))
    assert plan.pairs == len(range(ahead - 1, -1, -step))
    assert plan.is_full == (ahead == 1)


def test_a_decode_step_is_planned_with_its_neighbours() -> None:
    mask = masks.Causal() & (masks.Window(5, 0) | masks.Global([0]))
    plan = plan_of(mask, (1, 1, 1, 1001), 1000, 0)
    assert isinstance(plan, RowPlan)
    assert (len(plan), plan.pairs) == (1, 7)
    assert plan_of(mask, (1, 1, 1, 1001), 1000, 0) is plan
    full = plan_of(masks.Causal(), (2, 3, 1, 9), 8, 0)
    assert full.is_full
    assert full.pairs == 2 * 3 * 9


def test_other_rows_are_planned_alone() -> None:
    assert not isinstance(plan_of(masks.Causal(), (1, 1, 1, 9), 4, 0), RowPlan)
    assert not isinstance(plan_of(masks.Causal(), (1, 1, 2, 9), 7, 0), RowPlan)
    assert not isinstance(plan_of(masks.Causal() & masks.Padding([4, 7]), (2, 1, 1, 9), 8, 0), RowPlan)


@dataclasses.dataclass(frozen=True)
class Before(masks.Mask):
    """A rule of a user's own that knows no bounds, and of a box whether all of it is allowed."""

    position: int

    def allows(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (kv < self.position).expand(torch.broadcast_shapes(q.shape, kv.shape))

    def partial(self, box: Box) -> bool | Hashable:
        if box.keys[0] >= self.position:
            return False
        return True if box.keys[-1] < self.position else (self, box)


@pytest.mark.parametrize("position", [0, 3, 6, 9])
def test_residuals_are_read(position: int) -> None:
    plan = RowPlan(RowsAhead(Before(position), 5, 0, rows=30), 5, (1, 1, 1, 6))
    assert _row(plan, 5, 0, 6).tolist() == [key < position for key in range(6)]
    assert plan.pairs == (6 if position else 0)


@dataclasses.dataclass(frozen=True)
class Asked(masks.Mask):
    """Allows the last four keys, and looks at each box; what it is asked is written down."""

    groups: list[Groups] = dataclasses.field(default_factory=list, hash=False, compare=False)

    def allows(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return kv >= q - 3

    def bounds(self, groups: Groups, keys: KeyDomain) -> Bounds:
        self.groups.append(groups)
        return super().bounds(groups, keys)

    def partial(self, box: Box) -> bool | Hashable:
        seen = {key >= row - 3 for row in box.rows for key in box.keys}
        return seen.pop() if len(seen) == 1 else (self, box)


def test_the_row_alone_is_asked_about() -> None:
    mask = Asked()
    for kv_first, is_full in ((0, False), (1, False), (2, True), (3, True)):
        plan = RowPlan(RowsAhead(mask, 5, kv_first, rows=3), 5, (1, 1, 1, 6 - kv_first))
        assert plan.is_full is is_full
        assert torch.equal(_row(plan, 5, kv_first, 6 - kv_first), torch.arange(kv_first, 6) >= 2)
    for groups in mask.groups:
        assert [column.tolist() for column in groups[:3]] == [[ALL] * 3, [5, 6, 7], [5, 6, 7]]


def test_every_item_of_several_rules_is_asked_as_one() -> None:
    rules = Asked(), Asked()
    masks.PerItem(rules).bounds(
        Groups(np.asarray([0, 1]), np.asarray([2, 3]), np.asarray([2, 5])),
        KeyDomain(np.zeros(2, dtype=np.int64), np.full(2, 6)),
    )
    for rule in rules:
        assert [column.tolist() for column in rule.groups[0][:3]] == [[ALL] * 2, [2, 3], [2, 5]]
