"""The tiles of a plan hold the allowed pairs, and each row once, for every grouping of rows."""

from collections.abc import Hashable

import numpy as np
import pytest
import torch
from tests.masks.test_masks import _covered

from saccade import masks
from saccade.plan import ALL, Box, Groups, Triangle, make
from saccade.plan.key_ranges import KeyDomain, Spans
from saccade.plan.row_grouping import Layout, Sizes

ODD = masks.Predicate(lambda b, h, q, kv: (q + kv + b) % 3 != 0)


class Before(masks.Mask):
    """A user's rule without bounds, which knows of a box only whether all of it is allowed."""

    def allows(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (kv < 4).expand(torch.broadcast_shapes(q.shape, kv.shape))

    def partial(self, box: Box) -> bool | Hashable:
        if box.keys[0] >= 4:
            return False
        return True if box.keys[-1] < 4 else box


RULES = {
    "segments": masks.Segments(3, 2),
    "texts": masks.Documents([[2, 4, 3], [9]], rule=masks.Causal() & (masks.Window(1, 0) | masks.Global([0]))),
    "padding": masks.Padding([3, 7]),
    "items": masks.PerItem([masks.Window(1, 1), masks.Causal()]) & ODD,
    "strides": masks.Causal() & (masks.Window(1, 0) | masks.Strided(3) | masks.Global([0])),
    "odd strides": masks.Strided(2) & ODD,
    "long strides": masks.Strided(7) | masks.Strided(100),
    "a function": ODD,
    "a function in texts": masks.Documents([4, 5]) & ODD,
    "blocks": masks.Blocks([[True, False, True], [False, True, False], [True, True, True]], 3),
    "a box": Before() | masks.Window(0, 0),
    "a box alone": Before(),
}
WAYS = {
    "as it is": {},
    "tiles are free": {"row_grouping.TILE_COST": 0, "plan._ROW_BLOCKS": (5, 2, 1)},
    "rows apart": {"row_grouping._MAX_RESIDUAL": 1},
    "few rows": {"row_grouping._MAX_RESIDUAL": 20, "plan._ROW_BLOCKS": (4, 1)},
    "by a sample": {
        "row_grouping._MAX_RESIDUAL": 1,
        "plan._SAMPLE": 3,
        "row_grouping._FEW_GROUPS": 2,
        "plan._MOST_CACHED_TILES": 4,
    },
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RULES)
def test_any_way_holds_what_is_allowed(monkeypatch: pytest.MonkeyPatch, name: str, way: str) -> None:
    for place, value in WAYS[way].items():
        monkeypatch.setattr(f"saccade.plan.{place}", value)
    for q_len, kv_len in ((9, 9), (4, 9), (9, 5), (2, 9)):
        expected = RULES[name].to_dense(q_len, kv_len, batch=2)
        for whole_rows in (False, True):
            assert torch.equal(_covered(RULES[name], (2, 1, q_len, kv_len), whole_rows), expected)


def test_only_rules_of_several_terms_overlap() -> None:
    assert [make(RULES[name], (1, 1, 9, 9), q_first=0, kv_first=0).overlaps for name in ("strides", "a function")] == [
        True,
        False,
    ]


@pytest.mark.parametrize("mask", [masks.Causal(), masks.Causal() & masks.Strided(3)], ids=str)
@pytest.mark.parametrize("shape", [(90, 90), (60, 90)], ids=str)
def test_causal_tiles_need_no_residual(
    monkeypatch: pytest.MonkeyPatch, mask: masks.Mask, shape: tuple[int, int]
) -> None:
    monkeypatch.setattr("saccade.plan.row_grouping._MAX_RESIDUAL", 100)
    tiles = list(mask.plan(*shape).tiles)
    assert len(tiles) == max(step for step, _ in mask.terms())
    for tile in tiles:
        for strip in tile.columns:
            assert strip.partial is True or (isinstance(strip.partial, Triangle) and strip.partial.is_square)


def test_no_residual_is_larger_than_the_largest() -> None:
    for heads in (1, 5):
        some = masks.Blocks(torch.rand(heads, 4, 4) < 0.5, 25)
        plan = (some & masks.Predicate(lambda b, h, q, kv: q >= kv)).plan(100, heads=5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("saccade.plan.row_grouping._MAX_RESIDUAL", 2500)
            sizes = [
                tile.height * len(strip.keys) * heads
                for tile in plan.tiles
                for strip in tile.columns
                if strip.partial is not True
            ]
        assert 0 < max(sizes) <= 2500


def _spans(*of: list[tuple[int, int]]) -> Spans:
    starts, ends = np.moveaxis(np.asarray(of, dtype=np.int64), 2, 0)
    universe = KeyDomain(np.zeros(len(of), dtype=np.int64), np.full(len(of), 30))
    return Spans.of(starts, ends, universe)


class Apart(masks.Mask):
    """A mask with two items and three heads."""

    shape = 2, 3

    def allows(self, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return q - kv >= b - h


@pytest.mark.parametrize("step", [1, 2, 3, 7])
@pytest.mark.parametrize("told", [(5, 4, 2, 3), (5, 2, 2, 2), (1, 3, 1, 3)])
def test_pairs_of_a_layout_are_counted_one_by_one(step: int, told: tuple[int, int, int, int]) -> None:
    batch, heads, own_items, own_heads = told
    groups = Groups(np.asarray([ALL, 0, 0]), np.asarray([1, 5, 20]), np.asarray([1 + 8 * step, 5, 20 + step]), step)
    all_rows = [[(0, 4), (6, 13)], [(9, 9), (9, 9)], [(2, 3), (20, 27)]]
    unsure = [[(13, 17), (19, 22)], [(0, 8), (8, 9)], [(3, 3), (27, 30)]]
    layout = Layout(Apart(), Sizes((batch, heads, 60, 30), 0, 0), groups, _spans(*all_rows), _spans(*unsure))
    for i, (rows, item) in enumerate(((9, ALL), (1, 0), (2, 0))):
        at_step = [
            sum((key - int(groups.first[i])) % step == 0 for start, end in own[i] for key in range(start, end))
            for own in (all_rows, unsure)
        ]
        assert layout.widths[i] == sum(at_step)
        assert layout.copies[i] == (batch if item == ALL else 1) * heads
        assert layout.residuals[i] == rows * at_step[1] * (own_items if item == ALL else 1) * own_heads
    assert groups.at(np.asarray([2, 0])).step == step
    assert groups.rows.tolist() == [9, 1, 2]


def test_pairs_are_whole_numbers_however_many() -> None:
    length = 2**27 + 1  # whose square no float holds
    assert masks.Full().plan(length).pairs == length**2


@pytest.mark.parametrize("rows", [8, 9, 10])
def test_few_tiles_are_kept_and_many_are_made_anew(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr("saccade.plan.row_grouping._MAX_RESIDUAL", 1)
    monkeypatch.setattr("saccade.plan.plan._MOST_CACHED_TILES", 9)
    monkeypatch.setattr("saccade.plan.row_grouping._FEW_GROUPS", 2)
    plan = make(ODD, (1, 1, rows, 9), q_first=0, kv_first=0)
    one, other = list(plan.tiles), list(plan.tiles)
    assert one == other
    assert len(one) == rows
    assert [tile is again for tile, again in zip(one, other, strict=True)] == [rows <= 9] * rows
    monkeypatch.setattr("saccade.plan.row_grouping._FEW_GROUPS", 9)
    (layout,) = make(ODD, (1, 1, rows, 9), q_first=0, kv_first=0)._layouts
    assert (layout.tiles() is layout.tiles()) == (rows <= 9)
