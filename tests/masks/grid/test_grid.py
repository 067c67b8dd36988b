"""Rules on a grid, and rules behind other tokens."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.masks.grid.definitions import GRIDS, axial, behind, neighbors, swin
from tests.masks.test_masks import _covered
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.plan import ALL, Box, Groups
from saccade.plan.key_ranges import KeyDomain


@pytest.mark.parametrize("name", GRIDS)
def test_the_definition(name: str) -> None:
    mask, expected = GRIDS[name]
    n = len(expected)
    assert torch.equal(mask.to_dense(n)[0, 0], expected)
    assert mask.density(n) == pytest.approx(expected.double().mean().item(), abs=1e-12)
    assert mask == eval(repr(mask), {**vars(masks)})
    assert hash(mask) == hash(eval(repr(mask), {**vars(masks)}))


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("before, after", [(0, 3), (2, 0), (1, 2)])
def test_positions_off_the_grid_see_nothing_and_are_not_seen(name: str, before: int, after: int) -> None:
    mask, expected = GRIDS[name]
    n = len(expected) + before + after
    moved = mask.after(before)
    assert torch.equal(moved.to_dense(n)[0, 0], behind(expected, before, after))
    positions = torch.tensor([-1, before])
    seen = moved.to_dense(2, n, q_positions=positions)[0, 0]
    assert not seen[0].any()
    assert torch.equal(seen[1], behind(expected, before, after)[before])


@st.composite
def _grids(draw: st.DrawFn) -> tuple[masks.Mask, Tensor]:
    height, width = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    number = st.integers(0, 4)
    window = draw(st.integers(1, 4))
    shift = draw(st.integers(0, window - 1))
    whole = (-(-height // window) * window, -(-width // window) * window)
    # Swin's own table is made for whole windows; what lies beyond the grid is left out.
    inside = (torch.arange(whole[0])[:, None] < height) & (torch.arange(whole[1]) < width)
    v, h = draw(number), draw(number)
    axis = draw(st.sampled_from(["rows", "columns", "both"]))
    return draw(
        st.sampled_from(
            [
                (masks.Neighborhood(height, width, (v, h)), neighbors(height, width, v, h)),
                (masks.Axial(height, width, axis), axial(height, width, axis)),
                (
                    masks.ShiftedWindows(height, width, window, shift),
                    swin(*whole, window, shift)[inside.flatten()][:, inside.flatten()],
                ),
            ]
        )
    )


@pytest.mark.ci
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_plans_of_any_combination_cover_what_is_allowed(data: st.DataObject) -> None:
    mask, expected = data.draw(_grids(), label="grid")
    before, after = data.draw(st.integers(0, 3), label="before"), data.draw(st.integers(0, 2), label="after")
    mask, expected = mask.after(before), behind(expected, before, after)
    n = len(expected)
    if data.draw(st.booleans(), label="causal"):
        mask, expected = mask & masks.Causal(), expected.tril()
    if data.draw(st.booleans(), label="global"):
        mask, expected = mask | masks.Global([0]), expected.clone().index_fill_(0, torch.tensor([0]), True)
        expected[:, 0] = True
    if data.draw(st.booleans(), label="not"):
        mask, expected = ~mask, ~expected
    q_len = data.draw(st.integers(1, n), label="q_len")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "saccade.plan.plan._ROW_BLOCKS", data.draw(st.sampled_from([(768, 192, 48, 12, 1), (5, 1), (1,)]))
        )
        patch.setattr("saccade.plan.row_grouping.TILE_COST", data.draw(st.sampled_from([0, 30_000])))
        patch.setattr("saccade.plan.row_grouping._MAX_RESIDUAL", data.draw(st.sampled_from([1 << 22, 20])))
        got = _covered(mask, (1, 1, q_len, n))
    assert torch.equal(mask.to_dense(q_len, n)[0, 0], expected[n - q_len :])
    assert torch.equal(got[0, 0], expected[n - q_len :])


def test_a_large_grid_is_planned_by_its_rows_and_columns() -> None:
    plan = masks.Neighborhood(512, 512, 3).plan(512 * 512)
    assert plan.pairs < 512 * 512 * 12 * 512  # 7 rows of the grid, and those that a tile spans
    distinct = {strip.partial for tile in plan.tiles for strip in tile.columns}
    assert len(distinct) < 60
    columns = masks.Axial(512, 512, "columns").plan(512 * 512)
    assert columns.pairs == 512**3
    assert not columns.overlaps
    both = masks.Axial(512, 512).plan(512 * 512)
    assert both.pairs == 2 * 512**3
    windows = masks.ShiftedWindows(512, 512, 8).plan(512 * 512)
    assert windows.pairs <= 512 * 512 * 8 * 512


def test_ranges_of_keys_do_not_outgrow_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.masks.grid.grid._MAX_RANGES", 3)
    mask, expected = GRIDS["neighborhood"]
    assert torch.equal(_covered(mask, (1, 1, 35, 35))[0, 0], expected)


@pytest.mark.parametrize("mask, ranges", [(masks.Neighborhood(4, 5, 1), 3), (masks.Neighborhood(4, 5, (0, 1)), 1)])
@pytest.mark.parametrize("height", [1, 2])
def test_too_many_ranges_of_keys_are_one(
    mask: masks.Mask, ranges: int, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = np.asarray([row for row in range(-4, 24) if row // 5 == (row + height - 1) // 5])
    groups = Groups(np.full_like(first, ALL), first, first + height - 1)
    keys = KeyDomain(np.zeros_like(first), np.full_like(first, 25))
    table = torch.nn.functional.pad(mask.to_dense(25)[0, 0], (0, 0, 4, 0)).numpy()
    seen = [table[row + 4 : row + 4 + height] for row in first]
    for most in (len(first) * ranges, len(first) * ranges - 1):
        monkeypatch.setattr("saccade.masks.grid.grid._MAX_RANGES", most)
        bounds = mask.bounds(groups, keys)
        any_row, all_rows = ([[*itertools.chain(*x)] for x in part.ranges(first)] for part in bounds)
        if most == len(first) * ranges:
            assert any_row == [np.flatnonzero(rows.any(0)).tolist() for rows in seen]
            assert all_rows == [np.flatnonzero(rows.all(0)).tolist() for rows in seen]
        else:
            ends = [np.flatnonzero(rows.any(0))[[0, -1]] if rows.any() else (0, -1) for rows in seen]
            assert any_row == [[*range(start, last + 1)] for start, last in ends]
            assert not any(all_rows)


def test_cells_of_a_large_grid_see_themselves() -> None:
    """Rows of a large grid are computed without floats, so that each cell sees itself."""
    side = 1 << 13
    at, zero = torch.tensor([n * side - 1 for n in (1, 4097, 8190, 8192)]), torch.zeros(1, dtype=torch.int64)
    assert masks.Axial(side, side, "rows").allows(zero, zero, at, at).all()


def test_after_keeps_structure() -> None:
    n = 1 << 14
    inner, moved = masks.Window(64, 64), masks.Window(64, 64).after(5)
    assert moved.plan(n + 5).pairs <= 1.01 * inner.plan(n).pairs
    assert masks.Strided(4).after(3).plan(n).pairs <= 1.01 * masks.Strided(4).plan(n).pairs
    assert moved.partial(Box(0, range(105, 109), range(5, 9))) == inner.partial(Box(0, range(100, 104), range(4)))
    assert masks.Causal().after(0) == masks.Causal()
    assert masks.Causal().after(2).after(3) == masks.Causal().after(5)
    padded = masks.Padding([2, 4]).after(1)
    assert padded.shape == (2, 1)
    assert torch.equal(padded.to_dense(6)[:, 0, 1:, 1:], masks.Padding([2, 4]).to_dense(5)[:, 0])
    assert not padded.to_dense(6)[:, 0, 0].any()
    assert not padded.to_dense(6)[:, 0, :, 0].any()
    table = torch.rand(3, 3) < 0.5
    dense = masks.Dense(table).after(2)
    assert not dense.is_value
    assert dense.tensors()[0].data_ptr() == table.data_ptr()
    assert masks.Predicate(lambda b, h, q, kv: q == kv).after(1).calls_functions


def test_a_class_token() -> None:
    mask = masks.Neighborhood(3, 3, 1).after(1) | masks.Global([0])
    expected = behind(neighbors(3, 3, 1, 1), 1, 0)
    expected[0] = expected[:, 0] = True
    assert torch.equal(mask.to_dense(10)[0, 0], expected)
    torch.manual_seed(0)
    x = torch.randn(1, 2, 10, 4)
    scores = (x @ x.mT / 2).masked_fill(~expected, -torch.inf)
    torch.testing.assert_close(sc.attention(x, x, x, mask), scores.softmax(-1) @ x)


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: masks.Neighborhood(0, 3, 1), r"Neighborhood: height must be an int of at least 1; got 0\."),
        (lambda: masks.Neighborhood(3, True, 1), r"Neighborhood: width must be an int of at least 1; got True\."),
        (lambda: masks.Neighborhood(3, 3, -1), r"Neighborhood: radius must be an int of at least 0"),
        (lambda: masks.Neighborhood(3, 3, (1, 2, 3)), r"Neighborhood: radius must .*got \(1, 2, 3\)"),
        (lambda: masks.Neighborhood(3, 3, 1.0), r"Neighborhood: radius must .*got 1\.0"),
        (lambda: masks.Neighborhood(3, 3, True), r"Neighborhood: radius must .*got \(?True"),
        (lambda: masks.Axial(3, 2.0), r"Axial: width must be an int of at least 1; got 2\.0\."),
        (lambda: masks.Axial(3, 3, "row"), r"Axial: axis must be one of 'rows', 'columns', 'both'; got 'row'\."),
        (lambda: masks.ShiftedWindows(4, 4, 0), r"ShiftedWindows: window must be an int of at least 1; got 0\."),
        (lambda: masks.ShiftedWindows(4, 4, 2, 2), r"ShiftedWindows: shift must be below window 2; got 2\."),
        (lambda: masks.ShiftedWindows(4, 4, 2, -1), r"ShiftedWindows: shift must be an int of at least 0; got -1\."),
        (lambda: masks.Causal().after(-1), r"Causal\.after: length must be an int of at least 0; got -1\."),
        (lambda: masks.Causal().after(1.0), r"Causal\.after: length must be an int of at least 0; got 1\.0\."),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[], masks.Mask], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()
