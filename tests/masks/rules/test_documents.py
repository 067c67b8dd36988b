"""Packed texts: where their tokens stand in them, and a layer's pattern that begins anew with each."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.masks import brute_force

from saccade import masks
from saccade.masks.rules.documents import joined_with_batch_mask

TEXTS = [[2, 0, 3], [4, 1], [1]]


def _place(lengths: list[int], position: int) -> tuple[int, int] | None:
    """Number of a text, and the place in it; None in none."""
    begins = [sum(lengths[:number]) for number in range(len(lengths))]
    own = [(number, position - begin) for number, begin in enumerate(begins) if 0 <= position - begin < lengths[number]]
    return own[0] if own else None


def _places(lengths: list[int], row: list[int]) -> list[int]:
    return [-1 if place is None else place[1] for place in (_place(lengths, at) for at in row)]


@pytest.mark.parametrize("texts", [TEXTS, TEXTS[:1], [[0]]], ids=str)
@pytest.mark.parametrize("table", [[[-3, -1, 0, 1, 2, 3, 4, 5, 9]], [[0, 4, 2], [-1, 3, 5], [1, 0, 0]]], ids=str)
def test_positions_are_counted_from_the_start_of_the_own_text(texts: list[list[int]], table: list[list[int]]) -> None:
    items = max(len(texts), len(table))
    rows, lengths = (x * items if len(x) == 1 else x for x in (table, texts))
    found = masks.Documents(texts).places(torch.tensor(table))
    assert found.tolist() == [_places(own, row) for own, row in zip(lengths, rows, strict=True)]
    assert found.dtype == torch.int64


PATTERN = masks.Causal() & (masks.Window(1, 0) | masks.Global([0]))
PADDING, ODD = masks.Padding([5, 4]), masks.Window(0, None) | masks.Strided(2)
FACTS: list[tuple[masks.Mask, Callable[[int, int, int], bool]]] = [
    (masks.Documents([3, 4]), lambda b, i, j: True),
    (masks.Documents([3, 4], rule=ODD), brute_force.rule(masks.Documents([3, 4], rule=ODD))),
    (masks.Documents([3, 4]) & PADDING, brute_force.rule(PADDING)),
    (PADDING & masks.Documents([3, 4]), brute_force.rule(PADDING)),
    (PADDING & masks.Documents([3, 4]) & ODD & masks.Prefix(6), brute_force.rule(PADDING & ODD & masks.Prefix(6))),
]


@pytest.mark.parametrize("facts, besides", FACTS, ids=[str(facts) for facts, _ in FACTS])
def test_a_pattern_begins_anew_with_each_text(facts: masks.Mask, besides: Callable[[int, int, int], bool]) -> None:
    inside = brute_force.rule(PATTERN)

    def allows(b: int, i: int, j: int) -> bool:
        one, other = (_place([3, 4], at) for at in (i, j))
        same = one is not None and other is not None and one[0] == other[0]
        return same and inside(b, one[1], other[1]) and besides(b, i, j)

    expected = torch.tensor([[[allows(b, i, j) for j in range(7)] for i in range(7)] for b in range(2)])
    assert torch.equal(joined_with_batch_mask(PATTERN, facts).to_dense(7, batch=2)[:, 0], expected)


@pytest.mark.parametrize("facts", [PADDING, masks.Causal() & PADDING, masks.Documents([3, 4]) | PADDING], ids=str)
def test_other_facts_are_joined_with_the_pattern(facts: masks.Mask) -> None:
    assert joined_with_batch_mask(PATTERN, facts) == PATTERN & facts


@pytest.mark.parametrize("items", [1, 2, 3])
@pytest.mark.parametrize("texts", [1, 2, 3])
def test_a_rule_in_texts_tells_as_many_items_apart(texts: int, items: int) -> None:
    lengths, rule = [[2, 2]] * texts, masks.Padding([1, 2, 3][:items]) & masks.Blocks(torch.ones(4, 2, 2).bool(), 2)
    if 1 not in (texts, items) and texts != items:
        with pytest.raises(ValueError, match=rf"Documents: rule must be for 1 or {texts} batch items; got {items}"):
            masks.Documents(lengths, rule=rule)
    else:
        found = masks.Documents(lengths, rule=rule)
        assert found.shape == (max(texts, items), 4)
        for item in range(found.shape[0]):
            own = rule.to_dense(2)[item % items]
            assert torch.equal(found.to_dense(4)[item, :, 2:, 2:], own)


def test_texts_that_hold_nothing_are_cut_at_whole_numbers() -> None:
    assert masks.Documents([0, 0]).cuts(0, range(3)).dtype == np.int64
