"""Tests of the cases: complete, named once, and each mask equal to the same mask in plain integers."""

import dataclasses

import pytest
import torch

from saccade import masks, positions, scores, testing
from saccade.masks import Mask
from saccade.positions import Bias
from saccade.scores import Score

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


def test_every_kind_of_score_and_of_relative_bias_has_a_case():
    kinds = {
        kind
        for module, base in ((scores, Score), (positions, Bias))
        for name in module.__all__
        if isinstance(kind := getattr(module, name), type) and issubclass(kind, base)
    }
    used = {type(given) for case in testing.CASES for given in (case.score, case.relative)}
    assert kinds - {Score, Bias, scores.Modified} <= used  # whose functions have cases of their own


def parts(mask):
    """Return a mask and all its parts."""
    if mask is None:
        return []
    inner = [getattr(mask, "rule", None), getattr(mask, "part", None)]
    inner += [*getattr(mask, "parts", ()), *getattr(mask, "rules", ())]
    return [mask, *(found for one in inner for found in parts(one))]


def test_inputs_come_from_the_seed_alone():
    state = torch.get_rng_state()
    case = testing.CASES[0]
    first, second = case.inputs(torch.float32), case.inputs(torch.float32)
    assert torch.equal(first.query, second.query)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first.query, dataclasses.replace(case, seed=1).inputs(torch.float32).query)


def test_modules_come_from_the_case_alone():
    case = next(case for case in testing.CASES if case.name == "everything")
    state = torch.get_rng_state()
    problem, again = case.problem(torch.bfloat16), case.problem()
    assert torch.equal(torch.get_rng_state(), state)
    assert problem.score is not case.score
    assert {x.dtype for x in problem.parameters().values()} == {torch.bfloat16}
    assert {x.dtype for x in again.parameters().values()} == {torch.float64}
    assert not any(x.requires_grad for x in problem.parameters().values())
    assert all((x != 0).any() for x in problem.parameters().values())
    assert case.needs == ("scale", "softcap", "score", "relative", "sink_logit")
    assert again.but(bias=torch.zeros(1)).options["bias"].shape == (1,)
    assert again.options["bias"] is again.relative


def same(got, want):
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-12)


def mask_says(problem, case):
    """Return a problem's mask at the positions of its tokens: bool ``[batch, heads, q_len, kv_len]``."""
    if problem.mask is None:
        return torch.ones_like(problem.allowed)
    sizes = problem.query.shape[2], problem.key.shape[2]
    return problem.mask.to_dense(*sizes, batch=len(problem.query), heads=case.num_heads, **problem.positions)


@pytest.mark.parametrize("case", testing.CASES, ids=str)
def test_derived_problems_have_the_derived_truth(case):
    problem = case.problem()
    out, lse = truth = problem.truth()
    for index in range(case.batch):
        same(problem.item(index).truth(), (out[index : index + 1], lse[index : index + 1]))
    same(problem.heads_reversed().truth(), (out.flip(1), lse.flip(1)))
    same(problem.ungrouped().truth(), truth)
    same(problem.leaves(bias=True, parameters=True).truth(), truth)
    if problem.allowed.all():
        same(problem.keys_reversed().truth(), truth)
    if case.is_causal and not case.explicit_positions:
        steps = [problem.step(start, start + 1).truth() for start in range(case.q_len)]
        same([torch.cat(parts, 2) for parts in zip(*steps, strict=True)], truth)
    if not case.sink:
        (a, a_lse), (b, b_lse) = problem.part("early").truth(), problem.part("late").truth()
        both = torch.logaddexp(a_lse, b_lse)
        shares = ((part - both).exp().nan_to_num(nan=0.0)[..., None] for part in (a_lse, b_lse))
        same((sum(x * share for x, share in zip((a, b), shares, strict=True)), both), truth)


@pytest.mark.parametrize("case", testing.CASES, ids=str)
def test_derived_problems_have_the_derived_rule(case):
    problem = case.problem()
    made = [problem.heads_reversed(), problem.ungrouped(), problem.part("even"), problem.part("late")]
    made += [problem.item(index) for index in range(case.batch)]
    if case.is_causal and not case.explicit_positions:
        made += [problem.step(0, 1), problem.step(case.q_len - 1, case.q_len)]
    if problem.allowed.all():
        made.append(problem.keys_reversed())
    for one in made:
        assert (mask_says(one, case) == one.allowed).all() or case.name == "holes"
        assert one.query.shape[:3] + one.key.shape[2:3] == one.allowed.shape


def test_leaves_ask_for_what_is_wanted_and_leave_the_problem_alone():
    problem = next(case for case in testing.CASES if case.name == "bilinear-shaw-keys").problem()
    plain, trained = problem.leaves(), problem.leaves(parameters=True)
    assert not any(x.requires_grad for x in (*plain.parameters().values(), *problem.parameters().values()))
    assert sorted(trained.parameters()) == ["relative.weight", "score.weight", "sink_logit"]
    assert all(x.requires_grad and x.is_leaf for x in trained.parameters().values())


def test_inputs_are_the_same_numbers_in_every_dtype():
    wide, narrow = (testing.CASES[0].inputs(dtype) for dtype in (torch.float64, torch.bfloat16))
    assert torch.equal(wide.query.bfloat16(), narrow.query)


def test_positions_that_hold_no_token_see_nothing_and_are_not_seen():
    case = next(case for case in testing.CASES if case.name == "holes")
    assert case.allowed[0, 0].tolist() == [[True, False, True, False], [False] * 4, [True, False, True, False]]


def test_without_a_mask_positions_that_hold_no_token_are_hidden_too():
    case = testing.Case("holes", q_len=2, kv_len=3, q_positions=(1, -1), kv_positions=(0, -1, 2))
    assert case.allowed[0, 0].tolist() == [[True, False, True], [False] * 3]


def test_a_case_without_a_rule_trusts_its_mask():
    case = testing.Case("mine", masks.Causal(), q_len=2, kv_len=3)
    assert case.allowed[0, 0].tolist() == [[True, True, False], [True, True, True]]
    assert case.is_causal
