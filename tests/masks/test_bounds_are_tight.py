"""Tests of rules with exact bounds: the bounds are just the visible keys, and constant boxes are recognised."""

import functools
import itertools
import tracemalloc

import numpy as np
import pytest
import torch
from tests.masks.bounds_by_key import universe_of, written
from tests.masks.test_bounds import FIRST, LEN, RULES, part_of, table_of

from saccade import masks
from saccade.masks import (
    Axial,
    Blocks,
    Causal,
    Coarse,
    Documents,
    Global,
    Neighborhood,
    Prefix,
    ShiftedWindows,
    Strided,
    Window,
)
from saccade.plan import ALL, Box, Groups

TALL, WIDE = (torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.6 for shape in ((5, 3), (2, 5)))
MORE = [
    Blocks(TALL, 2),
    Blocks(WIDE, 2),
    Blocks(WIDE, 2).after(3),
    Blocks([[False, True, True, False, True]], 3),
    Documents([[3, 1], [1, 4]]),
    Documents([[0], [2, 5]]),
    Documents([1, 4, 1]),
    Documents([0, 0]),
    Neighborhood(4, 2, 1),
    Neighborhood(2, 3, (0, 2)).after(2),
    Axial(3, 4, "rows"),
    Axial(4, 2, "rows").after(1),
    ShiftedWindows(4, 3, 3),
]
WHOLE = [
    *MORE,
    Window(2, 1),
    Window(2, 1).after(3),
    Global([0, 4, 5]),
    Global([3, 4], seen=False),
    Coarse(Window(1, 0), 2),
    Documents([2, 0, 4]),
]
SINGLE = [
    *MORE,
    *(rule for rule in RULES if not isinstance(rule, masks.And | masks.Or | masks.Predicate | masks.Dense)),
    Neighborhood(3, 4, (1 << 62, 0)),
    Documents([3, 1, 6], rule=Window(1, 1)),
]
_known = functools.cache(table_of)
PAIRS = [(first, last) for first in range(FIRST, LEN) for last in range(first, LEN)]


def _items(mask: masks.Mask) -> list[int]:
    """Return the items to ask for: all at once too if the rule is the same for all."""
    return [0, 1] if mask.shape[0] > 1 else [ALL, 1]


def _asked(mask: masks.Mask, item: int, pairs: list[tuple[int, int]], step: int = 1) -> tuple[np.ndarray, ...]:
    """Return, for each group of rows, the keys in the bounds and those seen by some row and by all rows: bool."""
    firsts, lasts = np.asarray(pairs).T
    bounds = mask.bounds(Groups(np.full_like(firsts, item), firsts, lasts, step), universe_of((0, LEN), len(pairs)))
    table = _known(mask)
    parts = [part_of(table, item, range(first, last + 1, step), range(LEN)) for first, last in pairs]
    some, every = np.asarray([x.any((0, 1)) for x in parts]), np.asarray([x.all((0, 1)) for x in parts])
    any_row, all_rows = (written(spans, (0, LEN)) for spans in bounds)
    assert not bounds.is_exact or np.array_equal(some, every), "what is exact holds for every row"
    return any_row, all_rows, some, every


@pytest.mark.parametrize("mask", [rule for rule in SINGLE if "Strided" not in str(rule)], ids=str)
def test_bounds_of_one_row_are_exact(mask: masks.Mask) -> None:
    for item in _items(mask):
        any_row, all_rows, some, every = _asked(mask, item, [(row, row) for row in range(FIRST, LEN)])
        assert np.array_equal(any_row, some)
        assert np.array_equal(all_rows, every)


@pytest.mark.parametrize("mask", WHOLE, ids=str)
def test_bounds_of_consecutive_rows_are_exact(mask: masks.Mask) -> None:
    for item in _items(mask):
        any_row, all_rows, some, every = _asked(mask, item, PAIRS)
        assert np.array_equal(any_row, some)
        assert np.array_equal(all_rows, every)


def test_causal_leaves_the_own_keys_of_several_rows_to_a_triangle() -> None:
    any_row, all_rows, some, every = _asked(Causal(), ALL, PAIRS)
    several = np.asarray([first < last for first, last in PAIRS])[:, None]
    own = np.arange(LEN) == np.asarray([first for first, _ in PAIRS])[:, None]
    assert np.array_equal(any_row, some)
    assert np.array_equal(all_rows, every & ~(several & own))


@pytest.mark.parametrize("mask", [*RULES, *MORE], ids=str)
def test_one_group_alone_is_asked_like_many(mask: masks.Mask) -> None:
    for first, last in PAIRS[::7]:
        any_row, all_rows, some, every = _asked(mask, 1, [(first, last)])
        assert not (some & ~any_row).any()
        assert not (all_rows & ~every).any()


@pytest.mark.parametrize("mask", [mask for mask in (*RULES, *MORE) if mask.shape[0] > 1], ids=str)
def test_items_are_asked_together_as_they_are_alone(mask: masks.Mask) -> None:
    items, rows = np.repeat([0, 1], LEN), np.tile(np.arange(LEN), 2)
    bounds = mask.bounds(Groups(items, rows, rows), universe_of((0, LEN), len(rows)))
    for item in (0, 1):
        alone = mask.bounds(Groups(items[:LEN] + item, rows[:LEN], rows[:LEN]), universe_of((0, LEN), LEN))
        for one, all_of_them in zip(alone, bounds, strict=True):
            assert np.array_equal(written(one, (0, LEN)), written(all_of_them.at(items == item), (0, LEN)))


STEPS = [
    Global([0, 2, 5]),
    Global([1, 3, 4]).after(2),
    Global([0, 3, 4], seen=False),
    Strided(2),
    Strided(2).after(3),
    Window(2, 1).after(3),
]


@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize("mask", STEPS, ids=str)
def test_bounds_of_strided_rows_are_exact_at_strided_keys(mask: masks.Mask, step: int) -> None:
    """Bounds at strided keys are exact for strided rows, also if a group ends between two of its rows."""
    any_row, all_rows, some, every = _asked(mask, ALL, PAIRS, step)
    asked = np.asarray([(np.arange(LEN) - first) % step == 0 for first, _ in PAIRS])
    assert not (some & asked & ~any_row).any()
    assert not (all_rows & asked & ~every).any()
    if isinstance(mask, masks.After):
        is_before = [all(row < mask.length for row in range(first, last + 1, step)) for first, last in PAIRS]
        assert not any_row[is_before].any()
    if "Strided" in str(mask):
        assert np.array_equal(any_row & asked, some & asked)
        assert np.array_equal(all_rows & asked, every & asked)


@pytest.mark.parametrize("mask", [*RULES, *MORE], ids=str)
def test_cuts_are_whole_numbers(mask: masks.Mask) -> None:
    for item in (ALL, 0, 1):
        assert mask.cuts(item, range(FIRST, LEN)).dtype == np.int64


def test_bounds_of_many_groups_take_memory_for_their_own_ranges_alone() -> None:
    groups, mask = 300, Global(range(0, 400, 4))
    rows, keys = np.arange(groups), universe_of((0, 400), groups)
    tracemalloc.start()
    mask.bounds(Groups(np.full(groups, ALL), rows, rows), keys)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 300 * groups * len(mask.positions)  # bytes


# A rule, and where boxes may not go on: at the edges of what the rule tells apart.
BOXED: list[tuple[masks.Mask, list[int]]] = [
    (Causal(), []),
    (Blocks(TALL, 2), []),
    (Blocks(WIDE, 2), []),
    (Blocks([[False, True, True, False, True]], 3), []),
    (Coarse(Causal(), 2), []),
    (Global([0, 3, 4]), []),
    (Documents([3, 1, 2]), []),
    (Documents([1, 4, 1], rule=Causal()), [0, 1, 5, 6]),
    (Documents([[3, 1], [0]]), []),
    (Documents([[0], [1, 3]]), []),
    (Causal().after(2), [2]),
    (Window(2, 1).after(3), [3]),
    (Neighborhood(2, 3, 1), [0, 3, 6]),
    (Neighborhood(2, 4, (0, 1)).after(1), [1, 5, 9]),
    (Neighborhood(4, 2, 1), [0, 8]),
    (Axial(2, 3), [0, 3]),
    (Axial(4, 2, "rows"), [0, 8]),
    (ShiftedWindows(2, 4, 2, shift=1), [0, 4, 8]),
    (ShiftedWindows(4, 2, 2), [0, 8]),
]
SHORT = 9


@pytest.mark.ci
@pytest.mark.parametrize("mask, edges", BOXED, ids=[str(mask) for mask, _ in BOXED])
def test_a_box_that_is_the_same_throughout_is_known_to_be(mask: masks.Mask, edges: list[int]) -> None:
    table, first = _known(mask), 0 if isinstance(mask, Blocks) else FIRST  # before 0 nobody asks for blocks
    for item in _items(mask):
        for rows, keys in itertools.product(_within(first, edges), _within(0, edges)):
            part, partial = part_of(table, item, rows, keys), mask.partial(Box(item, rows, keys))
            is_same = part.all() or not part.any()
            assert partial is bool(part.any()) if is_same else not isinstance(partial, bool)


def _within(start: int, edges: list[int]) -> list[range]:
    """Return all ranges from ``start`` on that cross no edge."""
    found = [range(*ends) for ends in itertools.combinations(range(start, SHORT + 1), 2)]
    return [span for span in found if not any(span.start < edge < span.stop for edge in edges)]


# A rule, and two boxes of rows and keys that look alike to it.
ALIKE: list[tuple[masks.Mask, tuple[range, range], tuple[range, range]]] = [
    (Coarse(Causal(), 2), (range(3, 5), range(2, 6)), (range(5, 7), range(4, 8))),
    (Neighborhood(9, 9, 1), (range(21, 24), range(30, 34)), (range(22, 25), range(31, 35))),
    (Neighborhood(9, 9, 1), (range(21, 24), range(30, 34)), (range(30, 33), range(39, 43))),
    (Neighborhood(9, 9, 1), (range(21, 31), range(25, 40)), (range(30, 40), range(34, 49))),
    (Neighborhood(9, 9, 1).after(5), (range(26, 36), range(30, 45)), (range(35, 45), range(39, 54))),
    (Axial(9, 9), (range(21, 24), range(31, 34)), (range(31, 34), range(41, 44))),
]


@pytest.mark.parametrize("mask, one, other", ALIKE, ids=[f"{mask}, {one}" for mask, one, _ in ALIKE])
def test_boxes_that_look_alike_have_one_residual(
    mask: masks.Mask, one: tuple[range, range], other: tuple[range, range]
) -> None:
    partial = mask.partial(Box(0, *one))
    assert not isinstance(partial, bool)
    assert mask.partial(Box(0, *other)) == partial


# A rule that is made of another one, boxes of both, and that they hold the same.
MOVED: list[tuple[masks.Mask, Box, masks.Mask, Box]] = [
    (Documents([3, 9], rule=part), Box(0, range(3, 12, step), range(4, 12, step)), part, Box(0, *spans))
    for part, step, spans in (
        (Causal(), 1, (range(9), range(1, 9))),
        (Causal(), 2, (range(0, 9, 2), range(1, 9, 2))),
        (Window(2, 1), 3, (range(0, 9, 3), range(1, 9, 3))),
    )
] + [
    (Causal() & Prefix(9), Box(0, range(4), range(4)), Causal(), Box(0, range(4), range(4))),
    (Prefix(0) | Window(1, 0), Box(0, range(4), range(4)), Window(1, 0), Box(0, range(4), range(4))),
]


@pytest.mark.parametrize("mask, box, part, own", MOVED, ids=[f"{mask}, {box.rows}" for mask, box, *_ in MOVED])
def test_the_residual_is_that_of_the_deciding_rule(mask: masks.Mask, box: Box, part: masks.Mask, own: Box) -> None:
    assert mask.partial(box) == part.partial(own)


TERMS: list[tuple[masks.Mask, list[tuple[int, masks.Mask]]]] = [
    (Strided(2) & Strided(3), [(6, Strided(2) & Strided(3))]),
    (Strided(2) & Strided(2), [(2, Strided(2) & Strided(2))]),
    (Causal() & Window(2, 0), [(1, Causal() & Window(2, 0))]),
    (Strided(3) | Strided(2), [(2, Strided(2)), (3, Strided(3) & ~Strided(2))]),
    (Strided(2) | Strided(2), [(2, Strided(2) | Strided(2))]),
    (Strided(2) | Window(1, 0), [(1, Window(1, 0)), (2, Strided(2) & ~Window(1, 0))]),
    (Causal() | Window(2, 3), [(1, Causal() | Window(2, 3))]),
    (Strided(2).after(3), [(2, Strided(2).after(3))]),
    (Strided(3).after(3), [(3, Strided(3).after(3))]),
    (Causal().after(3), [(1, Causal().after(3))]),
    (Documents([3, 4], rule=Strided(2)), [(2, Documents([3, 4], rule=Strided(2)))]),
    (Documents([3, 4], rule=Strided(3)), [(3, Documents([3, 4], rule=Strided(3)))]),
    (Documents([3, 4], rule=Causal()), [(1, Documents([3, 4], rule=Causal()))]),
    (Axial(3, 2), [(1, Axial(3, 2, "rows")), (2, Axial(3, 2, "columns") & ~Axial(3, 2, "rows"))]),
    (Axial(3, 2, "columns"), [(2, Axial(3, 2, "columns"))]),
    (Axial(3, 1), [(1, Axial(3, 1))]),
]


@pytest.mark.parametrize("mask, terms", TERMS, ids=[str(mask) for mask, _ in TERMS])
def test_rules_with_steps_fall_into_terms(mask: masks.Mask, terms: list[tuple[int, masks.Mask]]) -> None:
    assert list(mask.terms()) == terms
