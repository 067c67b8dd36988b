"""Tests of the order and number of a law's trials, and of the note on a law that ran on few of them."""

import itertools
import sys
import types

import pytest
import torch
from tests.sampled import sampled

import saccade as sc
from saccade.masks import Causal
from saccade.testing.conformance import try_law
from saccade.testing.judging import Declaration, judge
from saccade.testing.judging.first_calls import first_calls
from saccade.testing.judging.judgement import CORE_LAWS
from saccade.testing.judging.kernel import Kernel


def flagged(q, k, v, causal=False):
    return sc.attention(q, k, v, Causal() if causal else None)


def masked(q, k, v, mask):
    return sc.attention(q, k, v, mask)


def off_by_one(q, k, v, causal=False):
    shift = k.shape[2] - q.shape[2] + 1
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    return sc.attention(q, k, v, mask.tril(shift) if causal else mask)


def _second_by_second(monkeypatch):
    """Replace the judge's clock by one that advances a second at every reading."""
    looks = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: float(next(looks)))
    monkeypatch.setattr(sys.modules["saccade.testing.judging.judge"], "time", clock)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("function", [flagged, masked])
def test_each_law_begins_with_two_causal_cases(function, seed):
    kernel = Kernel.of(function, Declaration())
    for trials in kernel.trials_by_law(["oracle", "causality", "sizes", "large_scores"], None, None, seed):
        (square, fewer) = (case for _, case, _ in trials[:2])
        assert square.mask == fewer.mask == Causal()
        assert 1 < square.q_len == square.kv_len
        assert 1 < fewer.q_len < fewer.kv_len
        assert len({*map(str, trials)}) == len(trials)  # none is lost or repeated


def test_an_off_by_one_is_found_by_the_first_trial_of_each_law(monkeypatch):
    _second_by_second(monkeypatch)
    found = judge(off_by_one, laws=list(CORE_LAWS), minutes=0.1, seed=0)
    assert found.skipped > 0
    assert {result.law for result in found.unexpected} == {*CORE_LAWS}


def test_a_law_that_ran_on_few_trials_says_on_how_many(monkeypatch):
    _second_by_second(monkeypatch)
    found = judge(flagged, laws=["oracle"], minutes=0.1, seed=0)
    (law,) = found.report.laws
    ran, all_of_them = len(found.report.kept), len(found.report.kept) + found.skipped
    assert 0 < ran < all_of_them
    assert found.why(law) == f"kept on {ran} of {all_of_them} trials"
    assert found.why(law) in str(found)
    whole = judge(flagged, laws=["oracle"], cases=["causal", "none", "window"], seed=0)
    assert (whole.why(law), whole.skipped) == ("", 0)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("function", "claims"),
    sampled(
        [
            pytest.param(masked, {"widths": (8, 32), "masks": ("padding",)}),
            pytest.param(flagged, {}),
            pytest.param(flagged, {"groups": False, "empty": False}),
        ],
        3,
    ),
)
def test_what_is_refused_in_advance_is_refused_when_it_runs(function, claims):
    kernel = first_calls(Kernel.of(function, Declaration(**claims)))
    subject = kernel.subject(kernel, "cpu")
    names = ["oracle", "bias", "sensitivity", "zero_lengths", "declined", "sizes", "drawn_sizes", "order_of_calls"]
    trials = [trial for each in kernel.trials_by_law(names, None, [torch.float32], 0) for trial in each]
    refuse = kernel.refuser(subject)
    refused = [(trial, result) for trial in trials if (result := refuse(*trial)) is not None]
    assert len(refused) > 200
    for trial, result in refused:
        ran = try_law(subject, *trial)
        assert (ran.verdict, ran.message) == (result.verdict, result.message)
