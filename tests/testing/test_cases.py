"""The cases: complete, named once, and each mask equal to the same mask said in plain integers."""

import dataclasses

import pytest
import torch

from saccade import masks, testing
from saccade.masks import Mask

EVERY = (*testing.CASES, *testing.LARGE_CASES)


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_a_mask_equals_its_rule(case):
    assert case.rule is not None or case.mask is None, "a rule in plain integers is what the mask is judged by"
    assert torch.equal(dataclasses.replace(case, rule=None).allowed, case.allowed) or case.explicit_positions


def test_names_are_unique():
    names = [case.name for case in EVERY]
    assert sorted(names) == sorted(set(names))


def test_every_kind_of_mask_has_a_case():
    kinds = {
        kind for name in masks.__all__ if isinstance(kind := getattr(masks, name), type) and issubclass(kind, Mask)
    }
    used = {type(part) for case in testing.CASES for part in parts(case.mask)}
    assert kinds - {Mask} <= used


def parts(mask):
    """A mask and everything that it is made of."""
    if mask is None:
        return []
    inner = [getattr(mask, "rule", None), getattr(mask, "part", None), *getattr(mask, "parts", ())]
    return [mask, *(found for one in inner for found in parts(one))]


def test_inputs_come_from_the_seed_alone():
    state = torch.get_rng_state()
    case = testing.CASES[0]
    first, second = case.inputs(torch.float32), case.inputs(torch.float32)
    assert torch.equal(first.query, second.query)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first.query, dataclasses.replace(case, seed=1).inputs(torch.float32).query)


def test_inputs_are_the_same_numbers_in_every_dtype():
    wide, narrow = (testing.CASES[0].inputs(dtype) for dtype in (torch.float64, torch.bfloat16))
    assert torch.equal(wide.query.bfloat16(), narrow.query)


def test_positions_that_hold_no_token_see_nothing_and_are_not_seen():
    case = next(case for case in testing.CASES if case.name == "holes")
    assert case.allowed[0, 0].tolist() == [[True, False, True, False], [False] * 4, [True, False, True, False]]


def test_a_case_without_a_rule_trusts_its_mask():
    case = testing.Case("mine", masks.Causal(), q_len=2, kv_len=3)
    assert case.allowed[0, 0].tolist() == [[True, True, False], [True, True, True]]
    assert case.is_causal
