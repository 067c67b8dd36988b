"""Tests of measurements that agree or disagree, and of their texts."""

import math

import pytest
import torch

from saccade.theory.measurement import apart, at_least, at_most, equal, estimate, same


@pytest.mark.parametrize(
    "measurement, agrees",
    [
        (equal("x", 1.0 + 1e-13, 1.0), True),
        (equal("x", 1.0 + 1e-11, 1.0), False),
        (equal("x", 0.5, 1.0, 0.5), True),
        (equal("x", math.nan, math.nan), False),
        (equal("x", math.inf, 1.0), False),
        (at_most("x", 1.0, 1.0), True),
        (at_most("x", 1.1, 1.0), False),
        (at_most("x", 1.1, 1.0, 0.2), True),
        (at_most("x", -math.inf, 1.0), True),
        (at_most("x", math.nan, 1.0), False),
        (at_least("x", 1.0, 1.0), True),
        (at_least("x", 0.9, 1.0), False),
        (at_least("x", 0.9, 1.0, 0.2), True),
        (at_least("x", math.nan, 1.0), False),
        (apart("x", 2.0, 1.0, 0.5), True),
        (apart("x", 0.0, 1.0, 0.5), True),
        (apart("x", 1.4, 1.0, 0.5), False),
        (apart("x", math.nan, 1.0, 0.5), False),
    ],
)
def test_measurements_that_agree(measurement, agrees):
    assert measurement.agrees is agrees


def test_tensors_are_compared_entry_by_entry():
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    y = x.clone()
    y[1, 2] += 0.25
    assert same("x", x, x).agrees
    assert same("x", x, y).seen == 0.25
    assert not same("x", x, x[:1]).agrees
    assert not same("x", x, x * math.nan).agrees


def test_an_estimate_knows_its_error():
    samples = torch.randn(10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    right, wrong = estimate("mean", samples, 0.0), estimate("mean", samples, 0.1)
    assert right.agrees
    assert not wrong.agrees
    assert right.tolerance == pytest.approx(6 * samples.std().item() / 100)
    assert right.chance == 1e-6
    assert "10,000 samples" in right.why
    assert estimate("mean", samples, 0.1, bias=0.1).agrees


def test_an_estimate_is_as_sure_as_it_says():
    draws = torch.randn(400, 2_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).square()
    assert all(estimate("mean", one, 1.0).agrees for one in draws)
    # Six standard errors further off, every second one is found.
    error = 2**0.5 / 2_000**0.5
    found = sum(not estimate("mean", one, 1.0 - 6 * error).agrees for one in draws)
    assert 120 < found < 280


def test_it_says_what_it_saw():
    assert str(equal("x", 1.0, 2.0)) == "x: seen 1, expected 2 (± 1e-12, rounding)"
    assert str(equal("x", 2e-16, 0.0)) == "x: seen 0, expected 0 (± 1e-12, rounding)"
    assert str(equal("x", 2e-10, 0.0)) == "x: seen 2e-10, expected 0 (± 1e-12, rounding)"
    assert str(at_most("x", 1.0, 2.0)) == "x: seen 1, at most 2 (bound)"
    assert str(at_least("x", 1.0, 2.0, 0.5)) == "x: seen 1, at least 2 (+ 0.5, rounding)"
    assert str(apart("x", 1.0, 2.0, 0.5)) == "x: seen 1, claimed 2 (refuted if more than 0.5 off)"
