"""Sets of keys as ranges, against Python's own sets."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.plan.key_ranges import Bounds, KeyDomain, Spans, sort_rows

PLACES = st.integers(-3, 12)


class Drawn(NamedTuple):
    """Two sets of keys for each of some groups, both ways, and the keys that there are."""

    universe: KeyDomain
    keys: list[set[int]]
    spans: tuple[Spans, Spans]
    sets: tuple[list[set[int]], list[set[int]]]


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    groups = draw(st.integers(1, 3))
    firsts = draw(st.lists(st.integers(0, 4), min_size=groups, max_size=groups))
    stops = [first + draw(st.integers(0, 9)) for first in firsts]
    universe = KeyDomain(np.asarray(firsts), np.asarray(stops))
    keys = [set(range(first, stop)) for first, stop in zip(firsts, stops, strict=True)]
    spans, sets = [], []
    for _ in range(2):
        slots = draw(st.integers(1, 4))
        pairs = [draw(st.lists(st.tuples(PLACES, PLACES), min_size=slots, max_size=slots)) for _ in range(groups)]
        starts, ends = np.moveaxis(np.asarray(pairs), 2, 0)
        spans.append(Spans.of(starts, ends, universe))
        sets.append([own & _members(part) for own, part in zip(keys, pairs, strict=True)])
    return Drawn(universe, keys, (spans[0], spans[1]), (sets[0], sets[1]))


def _members(pairs: list[tuple[int, int]]) -> set[int]:
    return {key for start, end in pairs for key in range(start, end)}


def _is(spans: Spans, sets: list[set[int]]) -> None:
    """The sets, in ranges that are sorted and apart, empty ones last."""
    rows = np.zeros(len(sets), dtype=np.int64)
    assert spans.sizes().tolist() == [len(own) for own in sets]
    for ranges, own in zip(spans.ranges(rows), sets, strict=True):
        assert [key for part in ranges for key in part] == sorted(own)
        assert all(left.stop < right.start for left, right in itertools.pairwise(ranges))
    is_empty = spans.starts >= spans.ends
    assert not (is_empty[:, :-1] & ~is_empty[:, 1:]).any()


@settings(deadline=None, max_examples=50)
@given(drawn())
def test_sets_are_joined_as_sets_are(of: Drawn) -> None:
    universe, keys, (one, two), (a, b) = of
    _is(one, a)
    _is(Spans.everything(universe), keys)
    _is(Spans.nothing(universe), [set() for _ in keys])
    _is(one.union(two, universe), [x | y for x, y in zip(a, b, strict=True)])
    _is(one.intersection(two, universe), [x & y for x, y in zip(a, b, strict=True)])
    _is(one.minus(two, universe), [x - y for x, y in zip(a, b, strict=True)])
    _is(one.complement(universe), [every - x for every, x in zip(keys, a, strict=True)])


@settings(deadline=None, max_examples=50)
@given(drawn(), st.data())
def test_sets_are_chosen_and_moved_group_by_group(of: Drawn, data: st.DataObject) -> None:
    universe, keys, (one, two), (a, b) = of
    choose = data.draw(st.lists(st.booleans(), min_size=len(keys), max_size=len(keys)))
    offsets = data.draw(st.lists(st.integers(-4, 4), min_size=len(keys), max_size=len(keys)))
    which = data.draw(st.lists(st.integers(0, len(keys) - 1), min_size=1))
    _is(one.where(np.asarray(choose), two), [x if own else y for x, y, own in zip(a, b, choose, strict=True)])
    moved = [{key + by for key in x} & every for x, every, by in zip(a, keys, offsets, strict=True)]
    _is(one.shifted(np.asarray(offsets), universe), moved)
    _is(one.at(np.asarray(which)), [a[i] for i in which])


@settings(deadline=None, max_examples=50)
@given(drawn(), st.data())
def test_one_range_is_cut_to_the_keys_that_there_are(of: Drawn, data: st.DataObject) -> None:
    first, stop = (data.draw(st.lists(PLACES, min_size=len(of.keys), max_size=len(of.keys))) for _ in range(2))
    cut = [every & set(range(*pair)) for every, *pair in zip(of.keys, first, stop, strict=True)]
    _is(Spans.within(of.universe, np.asarray(first), np.asarray(stop)), cut)
    _is(Spans.within(of.universe, first[0], stop[0]), [every & set(range(first[0], stop[0])) for every in of.keys])


@settings(deadline=None, max_examples=50)
@given(drawn(), st.integers(1, 5), st.data())
def test_ranges_part_by_a_step_hold_the_keys_at_multiples_of_it(of: Drawn, step: int, data: st.DataObject) -> None:
    rows = data.draw(st.lists(PLACES, min_size=len(of.keys), max_size=len(of.keys)))
    for ranges, own, row in zip(of.spans[0].ranges(np.asarray(rows), step), of.sets[0], rows, strict=True):
        assert [key for part in ranges for key in part] == sorted(key for key in own if (key - row) % step == 0)
        assert all(part and part.step == step for part in ranges)


@settings(deadline=None, max_examples=50)
@given(drawn(), st.data())
def test_bounds_of_a_formula_hold_what_their_parts_do(of: Drawn, data: st.DataObject) -> None:
    universe, keys, (one, two), (a, b) = of
    pairs = list(zip(a, b, strict=True))
    left = Bounds(one.union(two, universe), one)  # keys that some row needs, and keys that all have
    right = Bounds.exactly(two)
    _are(left.both(right, universe), [(x | y) & y for x, y in pairs], [x & y for x, y in pairs])
    _are(left.either(right, universe), [x | y for x, y in pairs], [x | y for x, y in pairs])
    outside = list(zip(keys, pairs, strict=True))
    _are(
        left.inverted(universe), [every - x for every, (x, _) in outside], [every - x - y for every, (x, y) in outside]
    )
    _are(Bounds.unknown(universe), keys, [set() for _ in keys])
    choose = data.draw(st.lists(st.booleans(), min_size=len(keys), max_size=len(keys)))
    chosen = left.where(np.asarray(choose), right)
    any_row = [x | y if own else y for (x, y), own in zip(pairs, choose, strict=True)]
    _are(chosen, any_row, [x if own else y for (x, y), own in zip(pairs, choose, strict=True)])
    for exact in (right, right.both(right, universe), right.either(right, universe), right.inverted(universe)):
        assert exact.is_exact


def _are(bounds: Bounds, any_row: list[set[int]], all_rows: list[set[int]]) -> None:
    _is(bounds.any_row, any_row)
    _is(bounds.all_rows, all_rows)


def _sets(*of: list[tuple[int, int]]) -> tuple[Spans, KeyDomain]:
    """A set for each list of ranges, of the keys up to 12."""
    universe = KeyDomain(np.zeros(len(of), dtype=np.int64), np.full(len(of), 12))
    starts, ends = np.moveaxis(np.asarray(of, dtype=np.int64).reshape(len(of), -1, 2), 2, 0)
    return Spans.of(starts, ends, universe), universe


def test_sets_of_several_ranges_are_joined_range_by_range() -> None:
    (one, universe), (two, _), (three, _) = (
        _sets([(1, 3), (5, 7)], [(0, 1), (2, 12)]),
        _sets([(2, 6), (8, 9)], [(3, 4), (9, 11)]),
        _sets([(1, 2), (3, 4), (5, 6)], [(0, 2), (4, 5), (6, 12)]),
    )
    _is(one.intersection(two, universe), [{2, 5}, {3, 9, 10}])
    choose = np.asarray([True, False])
    _is(one.where(choose, three), [{1, 2, 5, 6}, {0, 1, 4, *range(6, 12)}])
    _is(three.where(choose, one), [{1, 3, 5}, {0, *range(2, 12)}])


def test_many_groups_are_read_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.plan.key_ranges._AT_ONCE", 2)
    spans, _ = _sets(*[[(i, i + 1), (i + 3, 12)] for i in range(5)])
    _is(spans, [{i, *range(i + 3, 12)} for i in range(5)])


def test_no_room_is_kept_for_ranges_that_are_joined() -> None:
    for spans, universe in (_sets([(0, 3), (3, 6)]), _sets([(0, 3), (2, 6), (5, 9)], [(1, 2), (2, 3), (3, 9)])):
        assert spans.starts.shape[1] == 1
        for _ in range(4):
            spans = spans.union(spans, universe).complement(universe).complement(universe)  # noqa: PLW2901
        assert spans.starts.shape[1] <= 2  # one that is empty may stay


def test_there_may_be_no_groups_at_all() -> None:
    none = np.zeros((0, 3), dtype=np.int64)
    universe = KeyDomain(none[:, 0], none[:, 0])
    spans = Spans.of(none, none, universe)
    assert spans.starts.shape == (0, 1)
    _is(spans.union(spans.complement(universe), universe), [])


@pytest.mark.parametrize("groups", [3, 600])
@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8, 13, 16, 17])
def test_rows_are_sorted_whatever_their_number_and_length(groups: int, slots: int) -> None:
    values = np.random.default_rng(slots).integers(0, 9, (groups, slots))
    for order in ("C", "F"):
        own = values.copy(order)
        sort_rows(own)
        assert own.tolist() == [sorted(row) for row in values.tolist()]


def test_many_groups_are_joined_as_few_are() -> None:
    edges = np.sort(np.random.default_rng(0).integers(-3, 40, (2, 700, 3, 2)), axis=-1)
    universe = KeyDomain(np.full(700, 2), np.full(700, 33))
    one, two = (Spans.of(own[..., 0], own[..., 1], universe) for own in edges)
    sets = [[_members([(max(a, 2), min(b, 33)) for a, b in row]) for row in own] for own in edges.tolist()]
    _is(one.union(two, universe), [a | b for a, b in zip(*sets, strict=True)])
    _is(one.intersection(two, universe), [a & b for a, b in zip(*sets, strict=True)])
    _is(one.minus(two, universe), [a - b for a, b in zip(*sets, strict=True)])
