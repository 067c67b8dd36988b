"""Rows in squares: masks that know what they see in any order of rows."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.masks.random_masks import expressions
from tests.masks.test_masks import _covered

from saccade import masks
from saccade.masks.grid.grid import Squares
from saccade.masks.grid.row_order import GridSize, InOrder, RowOrder, in_order, wanted_order
from saccade.plan import ALL, Box, Groups, make
from saccade.plan.key_ranges import KeyDomain


def test_squares_follow_one_another() -> None:
    order = RowOrder(GridSize(3, 5, 1), Squares(2, 2), 0, 18)
    expected = [0, 1, 2, 6, 7, 3, 4, 8, 9, 5, 10, 11, 12, 13, 14, 15, 16, 17]
    assert order.rows.tolist() == expected
    assert order.rows[order.places].tolist() == list(range(18))
    later = RowOrder(GridSize(3, 5, 1), Squares(2, 2), 7, 9)
    assert (later.rows + 7).tolist() == [position for position in expected if 7 <= position < 16]
    shifted = RowOrder(GridSize(3, 4, 0), Squares(2, 2, 1, 1), 0, 12)
    assert shifted.rows.tolist() == [0, 1, 2, 3, 4, 8, 5, 6, 9, 10, 7, 11]


def test_masks_that_want_an_order() -> None:
    near = masks.Neighborhood(4, 6, 1)
    wanted = RowOrder(GridSize(4, 6, 0), near.squares, 2, 9)
    assert wanted_order(near, 2, 9) == wanted
    assert wanted_order(masks.Causal() & ~(masks.Global([0]) | near), 2, 9) == wanted
    assert wanted_order(near.after(3) | masks.Global([0]), 2, 9).grid_size == GridSize(4, 6, 3)
    assert wanted_order(masks.ShiftedWindows(4, 6, 2, 1), 0, 24).squares == Squares(2, 2, 1, 1)
    assert wanted_order(masks.Axial(4, 6), 0, 24).squares == Squares(8, 8)
    assert wanted_order(masks.Causal() | masks.Axial(4, 6, "rows"), 2, 9) is None


def test_parts_keep_what_they_know() -> None:
    near = masks.Neighborhood(64, 64, 3)
    order = wanted_order(near, 0, 4097)
    mask = in_order(near.after(1) | masks.Global([0]), order)
    plan = make(in_order(near, order), (1, 1, 4096, 4096), q_first=0, kv_first=0)
    assert plan.pairs <= 64 * 64 * 14 * 14
    assert isinstance(mask, masks.Or)
    behind = near.after(1) | masks.Global([0])
    plan = make(in_order(behind, wanted_order(behind, 0, 4097)), (1, 1, 4097, 4097), q_first=0, kv_first=0)
    assert plan.pairs <= 64 * 64 * (14 * 14 + 1) + 4097


def test_inner_squares_share_their_residuals() -> None:
    near = masks.Neighborhood(80, 80, 3)
    mask = in_order(near, wanted_order(near, 0, 6400))
    plan = make(mask, (1, 8, 6400, 6400), q_first=0, kv_first=0)
    distinct = {strip.partial for tile in plan.tiles for strip in tile.columns}
    assert len(distinct) < 200  # of 9 kinds of squares, by 8 to 14 ranges
    assert sum(len(tile.columns) for tile in plan.tiles) > 1000


def test_windows_are_seen_whole() -> None:
    windows = masks.ShiftedWindows(14, 21, 7, 3)
    plan = make(in_order(windows, wanted_order(windows, 0, 294)), (64, 8, 294, 294), q_first=0, kv_first=0)
    assert all(strip.partial is True for tile in plan.tiles for strip in tile.columns)
    assert plan.pairs == 64 * 8 * windows.density(294) * 294 * 294


@st.composite
def _orders(draw: st.DrawFn, q_first: int, q_len: int) -> tuple[RowOrder, masks.Mask]:
    height, width = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    before = draw(st.integers(0, 3))
    window = draw(st.integers(1, 4))
    grid = draw(
        st.sampled_from(
            [
                masks.Neighborhood(height, width, (draw(st.integers(0, 3)), draw(st.integers(0, 3)))),
                masks.Axial(height, width, draw(st.sampled_from(["rows", "columns", "both"]))),
                masks.ShiftedWindows(height, width, window, draw(st.integers(0, window - 1))),
            ]
        )
    )
    cut = Squares(*(draw(st.integers(1, 4)) for _ in range(2)), *(draw(st.integers(0, 2)) for _ in range(2)))
    return RowOrder(GridSize(height, width, before), cut, q_first, q_len), grid.after(before)


def _check_plans(data: st.DataObject) -> None:
    q_first, q_len, kv_first, kv_len = (data.draw(st.integers(*ends)) for ends in ((0, 9), (1, 40), (0, 3), (1, 40)))
    order, grid = data.draw(_orders(q_first, q_len), label="order")
    other = data.draw(expressions(1), label="other")
    mask = data.draw(st.sampled_from([grid, grid | other, grid & other, ~grid, other & ~grid]), label="mask")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "saccade.plan.row_groups._ROW_BLOCKS", data.draw(st.sampled_from([(768, 192, 48, 12, 1), (5, 1), (1,)]))
        )
        patch.setattr("saccade.plan.layout.TILE_COST", data.draw(st.sampled_from([0, 30_000])))
        patch.setattr("saccade.plan.layout._MAX_RESIDUAL", data.draw(st.sampled_from([1 << 22, 20])))
        got = _written(in_order(mask, order), q_len, kv_first, kv_len)
    q, kv = torch.from_numpy(order.rows) + q_first, torch.arange(kv_first, kv_first + kv_len)
    assert torch.equal(got, mask.to_dense(q_len, kv_len, batch=1, q_positions=q, kv_positions=kv)[0, 0])


@pytest.mark.ci
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_plans_in_any_order_cover_what_is_allowed(data: st.DataObject) -> None:
    _check_plans(data)


@pytest.mark.slow
@settings(max_examples=2_000, deadline=None)
@given(data=st.data())
def test_many_plans_in_any_order(data: st.DataObject) -> None:
    _check_plans(data)


def _written(mask: masks.Mask, q_len: int, kv_first: int, kv_len: int) -> torch.Tensor:
    """A plan written out; on the way, its promises about residual keys are checked."""
    got = torch.zeros(q_len, kv_len, dtype=torch.bool)
    zero = torch.zeros(1, dtype=torch.int64)
    contents: dict[object, torch.Tensor] = {}
    for tile in make(mask, (1, 1, q_len, kv_len), q_first=0, kv_first=kv_first).tiles:
        rows = torch.tensor(list(tile.rows))[:, None]
        for strip in tile.columns:
            keys = torch.tensor(list(strip.keys))
            part = tile.rule.allows(zero, zero, rows, keys + kv_first).expand(len(rows), len(keys))
            assert not (got[rows, keys] & part).any()
            got[rows, keys] |= part
            same = contents.setdefault(strip.partial, part)
            assert part.all() if strip.partial is True else torch.equal(same, part)
    return got


def test_in_the_order_of_positions_nothing_changes() -> None:
    mask = masks.Neighborhood(4, 5, 1)
    order = RowOrder(GridSize(4, 5, 0), Squares(1, 5), 0, 20)
    assert np.array_equal(order.rows, np.arange(20))
    same = InOrder(mask, order)
    assert torch.equal(_covered(same, (1, 1, 20, 20)), mask.to_dense(20))
    assert str(same) == str(mask)
    assert same.partial(Box(0, range(5), range(15, 20))) is False


@pytest.mark.ci
@pytest.mark.parametrize("grid", [masks.Neighborhood(4, 5, (1, 0)), masks.Axial(4, 5), masks.ShiftedWindows(4, 5, 2)])
@pytest.mark.parametrize("is_in_order", [False, True])
def test_equal_residual_keys_mean_equal_contents_on_every_box(grid: masks.Mask, is_in_order: bool) -> None:
    order = RowOrder(GridSize(4, 5, 1), Squares(2, 2), 0, 22)
    mask = InOrder(grid.after(1), order) if is_in_order else grid.after(1)
    dense = grid.after(1).to_dense(22)[0, 0]
    dense = dense[torch.from_numpy(order.rows)] if is_in_order else dense
    contents: dict[object, torch.Tensor] = {}
    for first in range(22):
        for last in range(first, min(first + 5, 22)):
            for key_first in range(22):
                for key_last in range(key_first, min(key_first + 7, 22)):
                    rows, keys = range(first, last + 1), range(key_first, key_last + 1)
                    part = dense[first : last + 1, key_first : key_last + 1]
                    same = contents.setdefault(mask.partial(Box(0, rows, keys)), part)
                    is_constant = same is not part and isinstance(mask.partial(Box(0, rows, keys)), bool)
                    assert (part == same.flatten()[0]).all() if is_constant else torch.equal(part, same)
    assert contents[True].all()
    assert not contents[False].any()


ORDERED = [
    masks.Neighborhood(4, 5, 1).after(2),
    masks.Neighborhood(4, 5, (0, 2)).after(2),
    masks.Axial(4, 5, "rows").after(2),
    masks.Axial(4, 5, "columns").after(2),
    masks.ShiftedWindows(4, 5, 2, shift=1).after(2),
    masks.Neighborhood(4, 5, 1),  # a grid that lies elsewhere
    masks.Causal() & masks.Window(6, 0),
    masks.Global([0, 3, 9]),
    masks.Padding([11, 20]),
]


@pytest.mark.ci
@pytest.mark.parametrize("q_first, q_len", [(0, 24), (1, 20), (7, 9), (8, 1)])
@pytest.mark.parametrize("squares", [Squares(2, 3), Squares(2, 2, 1, 1), Squares(8, 8)], ids=str)
@pytest.mark.parametrize("mask", ORDERED, ids=str)
def test_groups_of_rows_in_any_order_need_what_some_of_them_see(
    mask: masks.Mask, squares: Squares, q_first: int, q_len: int
) -> None:
    order = RowOrder(GridSize(4, 5, 2), squares, q_first, q_len)
    table = mask.to_dense(q_len, 24, batch=2, q_positions=torch.from_numpy(order.rows + q_first))[:, 0].numpy()
    ordered = in_order(mask, order)
    pairs = [(first, last) for first in range(q_len) for last in range(first, q_len)]
    first, last = np.asarray(pairs).T
    for item, universe in ((ALL, (0, 24)), (1, (4, 19))):
        edges = KeyDomain(*(np.full(len(pairs), edge) for edge in universe))
        bounds = ordered.bounds(Groups(np.full(len(pairs), item), first, last), edges)
        part = table if item == ALL else table[item : item + 1]
        for (start, stop), *found in zip(pairs, *(list(x.ranges(first)) for x in bounds), strict=True):
            any_row, all_rows = ({key for span in ranges for key in span} for ranges in found)
            rows = part[:, start : stop + 1, universe[0] : universe[1]]
            assert any_row >= {universe[0] + key for key in np.flatnonzero(rows.any((0, 1)))}
            assert all_rows <= {universe[0] + key for key in np.flatnonzero(rows.all((0, 1)))}
            assert all_rows == any_row or not bounds.is_exact


@pytest.mark.parametrize("mask", [masks.Causal(), masks.Window(5, 3), masks.Neighborhood(3, 3, 1)], ids=str)
def test_a_box_of_rows_in_another_order_is_as_constant_as_the_range_they_lie_in(mask: masks.Mask) -> None:
    order = RowOrder(GridSize(4, 5, 0), Squares(2, 2), 0, 20)
    table, same = mask.to_dense(20)[0, 0], InOrder(mask, order)
    contents: dict[object, torch.Tensor] = {}
    for first, last in itertools.combinations_with_replacement(range(20), 2):
        positions = order.rows[first : last + 1]
        whole = range(positions.min(), positions.max() + 1)
        for keys in (range(5), range(7, 9), range(6, 13), range(19, 20)):
            part, partial = (
                table[positions, keys.start : keys.stop],
                same.partial(Box(0, range(first, last + 1), keys)),
            )
            if isinstance(partial, bool):
                assert (part == partial).all()
                assert partial == mask.partial(Box(0, whole, keys))
            else:
                assert not isinstance(mask.partial(Box(0, whole, keys)), bool)
                assert torch.equal(contents.setdefault(partial, part), part)


@pytest.mark.parametrize("grid", [masks.Neighborhood(4, 5, (1, 0)), masks.Axial(4, 5), masks.ShiftedWindows(4, 5, 2)])
def test_residuals_of_keys_behind_other_tokens(grid: masks.Mask) -> None:
    """Keys before the grid are seen by nobody, and of those on it as much is known as if none stood before it."""
    behind, alone = (RowOrder(GridSize(4, 5, before), Squares(2, 2), before, 20) for before in (6, 0))
    moved, own = InOrder(grid.after(6), behind), InOrder(grid, alone)
    table = grid.to_dense(20)[0, 0][torch.from_numpy(alone.rows)]
    contents, known = dict[object, torch.Tensor](), set[bool]()
    for (first, last), step in itertools.product(itertools.combinations(range(0, 21, 2), 2), (1, 2)):
        rows = range(first, last, step)
        assert moved.partial(Box(0, rows, range(3, 6, step))) is False
        for start, stop in ((0, 5), (3, 9), (0, 20)):
            partial = moved.partial(Box(0, rows, range(start + 6, stop + 6, step)))
            expected, part = (
                own.partial(Box(0, rows, range(start, stop, step))),
                table[first:last:step, start:stop:step],
            )
            known |= {partial} if start == 0 and isinstance(partial, bool) else set()
            if isinstance(partial, bool):
                assert partial is expected
                assert (part == partial).all()
            else:
                assert not isinstance(expected, bool)
                assert torch.equal(contents.setdefault(partial, part), part)
    assert known
