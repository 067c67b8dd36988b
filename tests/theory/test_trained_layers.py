"""Tests of the trained layers behind claims about training, in a part of the steps of the slow checks."""

import pytest
import torch
from tests.sampled import sampled

from saccade import theory
from saccade.theory import trained_layers
from saccade.theory.trained_layers import attentive, convolution, learned, neighbours, recall, triples
from saccade.theory.tutorials import TUTORIALS

CLAIMS = [claim for claim in theory.CLAIMS if claim.topic == "trained-layers"]


@pytest.mark.ci
@pytest.mark.parametrize("claim", sampled(CLAIMS, 3), ids=lambda claim: claim.name)
def test_a_check_measures_all_that_is_said(claim, monkeypatch):
    def hardly(*given, **options):
        return learned(*given, **{**options, "steps": 2})

    monkeypatch.setattr(trained_layers, "learned", hardly)
    measured = [one.what for one in claim.check(7)]
    assert len(set(measured)) == len(measured) > 2
    assert {said.row for tutorial in TUTORIALS for said in tutorial.says if said.claim == claim.name} <= set(measured)


def test_two_neighbours_need_two_heads():
    one, four = (learned(attentive(heads), neighbours(1, 2), steps=60, rate=0.03).accuracy for heads in (1, 4))
    assert one.max() < 0.75
    assert four.min() > 0.9


def test_neighbours_are_for_convolutions():
    near = {"steps": 60, "rate": 0.03, "activation": torch.relu}
    assert learned(convolution, triples(), **near).accuracy.mean() > 0.6
    assert learned(attentive(4), triples(), **near).accuracy.mean() < 0.5


@pytest.mark.slow
def test_a_place_among_many_is_for_attention():
    far = {"steps": 200, "rate": 0.03, "width": 16}
    assert learned(attentive(1), recall(), **far).accuracy.mean() > 0.7
    assert learned(convolution, recall(), **far).accuracy.mean() < 0.3


def test_it_draws_what_it_needs_itself():
    before = torch.random.get_rng_state()
    first, second = (learned(attentive(2), neighbours(1), steps=3, rate=0.03, examples=40) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first.loss, second.loss)
    assert torch.equal(first.accuracy, second.accuracy)
