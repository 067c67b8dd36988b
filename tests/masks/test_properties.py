"""Tests of the properties of masks against their pairs."""

import dataclasses

import numpy as np
import pytest
import torch
from tests.masks.test_masks import ATOMS
from torch import Tensor

from saccade import masks
from saccade.masks import Causal, Dense, Documents, Full, Global, Padding, Predicate, Prefix, Strided, Window

DENSE = Dense(torch.eye(9, dtype=torch.bool))
KEYS = Dense(torch.tensor([[[[True, False, True]]]]))


@dataclasses.dataclass(frozen=True)
class Twice(masks.Mask):
    """A user's mask made of another one."""

    rule: masks.Mask

    @property
    def made_of(self) -> tuple[masks.Mask, ...]:
        return (self.rule,)

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return self.rule.allows(b, h, 2 * q, 2 * kv)


EVERY = [mask for atom in ATOMS for mask in (atom, ~atom, atom & Causal(), atom | Prefix(2), atom.after(1))]


@pytest.mark.parametrize("mask", EVERY, ids=str)
def test_properties_of_a_mask_are_true(mask: masks.Mask) -> None:
    allowed = mask.to_dense(9, batch=max(2, mask.shape[0]))
    if mask.is_relative:
        assert torch.equal(allowed[..., 1:, 1:], allowed[..., :-1, :-1])
    if mask.hides_keys_only:
        assert torch.equal(allowed, allowed[:, :1, :1].expand_as(allowed))
    if mask.is_causal:
        assert not allowed.triu(1).any()
    if not mask.is_fact_of_batch:
        assert mask.shape[0] == 1
        assert not mask.tensors()


RELATIVE = [Full(), Causal(), Window(2, 3), Strided(2), ~Causal() | Window(1, 0), Causal() & ~Strided(3)]
ABSOLUTE = [Global([0]), Prefix(2), Padding([3]), Causal() & Prefix(1), Causal().after(2), masks.Coarse(Causal(), 2)]
HIDES_KEYS = [Full(), Padding([3, 4]), Prefix(2), Global([1], sees=False), KEYS, ~Prefix(2) & Padding([5])]
TELLS_QUERIES_APART = [Causal(), Window(1, 1), Global([1]), DENSE, Prefix(2) & Causal(), Prefix(2).after(1)]
FACTS = [Padding([3]), Documents([2, 3]), DENSE, Causal() & ~Padding([3]), Twice(Padding([3])), Padding([2]).after(1)]
PATTERNS = [Causal(), Window(1, 1), Global([0]), Twice(Causal()), masks.longformer(2), masks.Neighborhood(3, 3, 1)]


def test_relative_masks_read_distances_alone() -> None:
    assert [mask.is_relative for mask in (*RELATIVE, *ABSOLUTE)] == [True] * 6 + [False] * 6


def test_masks_that_hide_keys_only_hide_them_from_all() -> None:
    assert [mask.hides_keys_only for mask in (*HIDES_KEYS, *TELLS_QUERIES_APART)] == [True] * 6 + [False] * 6


def test_facts_of_a_batch_say_so_wherever_they_stand() -> None:
    assert [mask.is_fact_of_batch for mask in (*FACTS, *PATTERNS)] == [True] * 6 + [False] * 6
    assert Predicate(lambda b, h, q, kv: q == kv).is_fact_of_batch  # it may read facts of a batch


def test_a_mask_made_of_another_knows_what_that_one_knows() -> None:
    assert Twice(Padding([3, 4])).shape == (2, 1)
    assert Twice(DENSE).tensors() == (DENSE.allowed,)
    assert not Twice(DENSE).is_value
    assert Twice(Predicate(lambda b, h, q, kv: q == kv)).calls_functions
    assert Twice(Causal()).is_value


class Apart(masks.Mask):
    """A user's mask that differs between items or heads."""

    def __init__(self, items: int, heads: int):
        self.apart = items, heads

    @property
    def shape(self) -> tuple[int, int]:
        return self.apart

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q - kv >= b - h


def test_a_rule_of_several_items_is_a_fact_of_them_and_one_of_heads_is_not() -> None:
    assert [Apart(2, 1).is_fact_of_batch, Apart(2, 3).is_fact_of_batch] == [True, True]
    assert [Apart(1, 3).is_fact_of_batch, Apart(1, 1).is_fact_of_batch] == [False, False]


def test_a_function_may_answer_for_all_pairs_at_once() -> None:
    for answer in (True, False, np.True_, np.False_):
        mask = Predicate(lambda b, h, q, kv, answer=answer: answer)
        assert mask.to_dense(2, 3).tolist() == [[[[bool(answer)] * 3] * 2]]


def test_padding_on_the_right_is_the_same_wherever_it_ends() -> None:
    assert Padding([3, 5], padded_len=9) == Padding([3, 5])
    assert Padding([0, 0], side="left", padded_len=0).to_dense(2).tolist() == [[[[False] * 2] * 2]] * 2


def test_one_causal_part_is_enough_for_an_intersection() -> None:
    assert (Causal() & Window(1, 1)).is_causal
    assert not (Causal() | Window(1, 1)).is_causal
    assert (Causal() | Window(1, 0)).is_causal
