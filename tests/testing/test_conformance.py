"""Tests of the kit on outside functions: its reports, and differences that it does not count."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from saccade import UnsupportedError, testing
from saccade.testing import Stepwise
from saccade.testing.laws.expect import LawBroken, same

FEW = testing.CASES[:3]
STEPWISE = Stepwise()


def broken_laws(report):
    return {result.law for result in report.broken}


@pytest.mark.slow
def test_torchs_function_in_five_lines():
    report = testing.check(
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True), seed=0
    )
    # A NaN or inf that is masked still takes part in its product: 0 * NaN is NaN.
    assert broken_laws(report) == {"blindness", "isolation"}
    untried = {result.law for result in report.not_offered} - {result.law for result in report.kept}
    assert untried - {"blindness", "isolation"} == {
        *("lse", "gradients_through_lse", "merge"),
        *("scale", "softcap", "bias", "order", "gradient_of_bias", "shift"),
        *("score", "relative", "sink"),
    }


def test_a_function_without_grouped_heads_is_handed_a_copy_per_head():
    report = testing.check(F.scaled_dot_product_attention, gqa=False, cases=FEW, dtypes=[torch.float64], seed=0)
    assert broken_laws(report) <= {"blindness", "isolation"}
    assert {result.message for result in report.not_offered if result.law == "gqa"} == {"takes no grouped heads"}


def test_names_of_cases_and_laws_stand_for_them():
    by_name = testing.check(
        F.scaled_dot_product_attention, gqa=False, cases=["causal"], laws=["oracle", "isolation"], seed=0
    )
    cases = [case for case in testing.CASES if case.name == "causal"]
    laws = [law for law in testing.LAWS if law.name in ("oracle", "isolation")]
    assert by_name == testing.check(F.scaled_dot_product_attention, gqa=False, cases=cases, laws=laws, seed=0)
    assert testing.check(F.scaled_dot_product_attention, gqa=False, cases="causal", laws="oracle", seed=0).kept


@pytest.mark.parametrize("argument, known", [("cases", "causal"), ("laws", "isolation")])
def test_unknown_names_of_cases_and_laws_are_refused(argument, known):
    with pytest.raises(ValueError, match=rf"^check: {argument} must be names of {argument}.*\nHint: {known}"):
        testing.check(F.scaled_dot_product_attention, **{argument: [known[:-1]]}, seed=0)
    with pytest.raises(TypeError, match=rf"^check: {argument} must be names of {argument}"):
        testing.check(F.scaled_dot_product_attention, **{argument: [3]}, seed=0)


def test_the_first_of_several_equal_differences_is_reported():
    """Rounding decides which difference is the largest, so that a report of that one would differ between machines."""
    off = torch.tensor([[0.0, 1.0, 1.0 + 1e-13], [1.0, 0.5, 1.0]], dtype=torch.float64)
    with pytest.raises(LawBroken, match=r"the output at \[0, 1\] is 1, not 0; error"):
        same("the output", off, torch.zeros_like(off), torch.float64)


def test_a_module_with_another_convention():
    class Flipped(nn.Module):
        def forward(self, x, hidden):
            query, key, value = x
            return F.scaled_dot_product_attention(query, key, value, ~hidden), None

    report = testing.check(
        Flipped(),
        call=lambda f, q, k, v, mask: f((q, k, v), ~mask)[0],
        gqa=False,
        cases=FEW,
        dtypes=[torch.float64],
        seed=0,
    )
    assert broken_laws(report) <= {"blindness", "isolation"}


def test_options_are_read_off_the_signature():
    def plain(query, key, value, mask, *, scale=None):
        raise NotImplementedError

    assert testing.Subject(plain).offers == {"scale", "gqa"}
    assert testing.Subject(F.scaled_dot_product_attention).offers == {"gqa"}
    assert testing.Subject(plain, call=lambda f, q, k, v, mask, **options: None).offers >= {"bias", "softcap"}
    assert testing.Subject(plain, offers=["bias"], with_lse=plain).offers == {"bias", "lse", "gqa"}


def test_no_signature_tells_whether_a_bias_may_be_relative():
    def biased(query, key, value, mask, *, bias=None):
        raise NotImplementedError

    def plain(query, key, value, mask):
        raise NotImplementedError

    assert testing.Subject(biased).undeclared == {"relative"}
    assert "relative" not in testing.Subject(biased).offers
    assert testing.Subject(biased, offers=["bias"]).undeclared == frozenset()
    assert testing.Subject(biased, offers=["bias", "relative"]).offers == {"bias", "relative", "gqa"}
    assert testing.Subject(plain).undeclared == frozenset()  # without a bias there is none that is relative


def test_positions_come_along_with_a_relative_bias_only_where_masks_are_tensors():
    taken = []

    def recording(query, key, value, mask, **options):
        taken.append(set(options))
        return value.new_zeros(*query.shape[:3], value.shape[3])

    subject = testing.Subject(recording, offers=["relative", "q_positions", "kv_positions"])
    cases = {case.name: case for case in testing.CASES}
    for name in ("ragged", "clipped-ragged", "clipped"):
        subject.output(cases[name].problem())
    assert taken == [set(), {"bias", "q_positions", "kv_positions"}, {"bias"}]


def test_a_derived_problem_that_is_refused_is_not_offered():
    def without_positions(query, key, value, mask, *, bias=None):
        return STEPWISE(query, key, value, mask, bias=bias)

    cases = [case for case in testing.CASES if case.name == "clipped-extend"]
    laws = [law for law in testing.LAWS if law.name == "key_order"]
    offers = ["bias", "relative"]
    report = testing.check(without_positions, offers=offers, cases=cases, laws=laws, dtypes=[torch.float64], seed=0)
    assert [result.message for result in report.not_offered] == ["takes no q_positions; takes no kv_positions"]


def test_reasons_that_crash_break_the_law():
    def crashing(*tensors, **options):
        raise RuntimeError("abacus")

    laws = [law for law in testing.LAWS if law.name == "declined"]
    report = testing.check(STEPWISE, reasons=crashing, cases=FEW, laws=laws, dtypes=[torch.float32], seed=0)
    assert {result.message for result in report.broken} == {"raised RuntimeError: abacus"}


def test_a_refusal_is_not_counted_as_kept():
    def refusing(query, key, value, mask):
        raise UnsupportedError("no", ("it is Sunday", "it rains"))

    report = testing.check(refusing, cases=FEW, dtypes=[torch.float32], seed=0)
    assert not report.kept
    assert not report.broken
    assert not report.ok
    assert report.not_offered[0].message == "it is Sunday; it rains"
    assert "it rains" in str(report)
    assert str(report).endswith("No law could be tried.")


def test_a_crash_breaks_the_law():
    def crashing(query, key, value, mask):
        return query @ value

    report = testing.check(crashing, cases=FEW, laws=testing.LAWS[:1], dtypes=[torch.float32], seed=0)
    assert [result.verdict for result in report.results] == ["broken"] * 3
    assert "raised RuntimeError" in report.broken[0].message


def test_a_result_that_is_no_tensor_is_explained():
    report = testing.check(lambda q, k, v, mask: (q, None), cases=FEW[:1], laws=testing.LAWS[:1], seed=0)
    assert "must return one tensor; got tuple. Hint: pass call=" in report.broken[0].message


def test_report_prints_laws_verdicts_and_the_first_counter_example():
    wrong = Stepwise()
    wrong.factor = lambda scale, query, score: 1.0
    report = testing.check(wrong, cases=FEW, laws=testing.LAWS[:3], dtypes=[torch.float64], seed=0)
    head, oracle, lse, gradients, untried, seed, summary = str(report).splitlines()
    assert head.split() == ["law", "kept", "broken", "not", "offered", "first", "counter-example"]
    assert oracle.split()[:4] == ["oracle", "1", "2", "."]
    assert "none-float64: the output at [" in oracle
    assert lse.split() == ["lse", ".", ".", "3"]
    assert gradients.split()[:4] == ["gradients_of_inputs", "1", "2", "."]
    assert untried == "not offered 3 times: returns no lse"
    assert seed == "seed 0: seed=0 repeats this run"
    assert summary == "2 of the 2 laws that could be tried are broken: oracle, gradients_of_inputs."
    with pytest.raises(testing.LawBroken, match=r"(?s)law .*oracle\[full-float64\] broken: the output at") as broken:
        report.raise_if_broken()
    assert str(broken.value).splitlines()[0] == summary


def test_a_report_without_faults_returns_itself():
    report = testing.check(Stepwise(), cases=FEW, laws=testing.LAWS[:1], seed=0)
    assert report.raise_if_broken() is report
    assert report.ok
    assert str(report).endswith("All 1 laws that could be tried hold.")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"offers": ["causal"]},
            ValueError,
            "offers must be among bias, scale, softcap, dropout_p, .*relative, q_pos.* causal",
        ),
        ({"masks": "float"}, ValueError, "masks must be one of 'dense', 'objects'; got 'float'"),
        ({"call": 3}, TypeError, "call must be callable; got int"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=f"check: {message}"):
        testing.check(F.scaled_dot_product_attention, **arguments, seed=0)


def test_a_device_that_is_not_there_is_no_fault_of_the_function():
    with pytest.raises(RuntimeError, match="abacus"):
        testing.check(Stepwise(), device="abacus", seed=0)


@pytest.mark.gpu
def test_it_runs_on_a_gpu():
    options = {"device": "cuda", "dtypes": [torch.float32], "cases": testing.CASES[::10]}
    report = testing.check(Stepwise(), with_lse=Stepwise().with_lse, **options, seed=0)
    assert report.raise_if_broken().ok


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([math.nan, 2.0], [math.nan, 2.0], True),  # that it ought not to be there is for the definition to say
        ([1.0, 2.0], [math.nan, 2.0], False),
        ([math.nan, 2.0], [1.0, 2.0], False),
        ([math.nan, 2.0], [math.nan, 2.1], False),
    ],
)
def test_a_nan_that_stays_has_not_changed(before, after, is_same):
    tensors = torch.tensor(after), torch.tensor(before)
    if is_same:
        same("a row", *tensors, torch.float32)
    else:
        with pytest.raises(testing.LawBroken, match="a row at"):
            same("a row", *tensors, torch.float32)


def test_a_function_without_a_backward_pass_is_judged_by_its_output():
    def forward(q, k, v, mask):
        with torch.no_grad():
            times = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
            return (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0) @ v

    laws = ["oracle", "isolation", "blindness", "empty_rows", "gradients_of_inputs", "gradcheck"]
    cases = ["causal", "padding", "nothing"]
    report = testing.check(forward, gradients=False, laws=laws, cases=cases, dtypes=[torch.float64], seed=0)
    verdicts = {law: {one.verdict for one in report.results if one.law == law} for law in laws}
    assert "kept" in verdicts["oracle"]
    assert "kept" in verdicts["empty_rows"]
    assert "broken" in verdicts["isolation"]  # a weight of 0 times NaN
    assert verdicts["gradients_of_inputs"] == verdicts["gradcheck"] == {"not offered"}
    assert {one.message for one in report.not_offered if one.law == "gradcheck"} == {"has no backward pass"}
