"""Accuracy of models that are trained with a mechanism or mask."""

import math

import pytest
from tests.sampled import sampled

from saccade.learning import MIXERS, QUESTIONS, Settings, quality, quality_on, train
from saccade.learning.training import Outcome
from saccade.masks import Causal, Window, sliding_window
from saccade.mechanisms import Linear, Nystrom, Softmax
from saccade.nn import MultiHeadAttention


@pytest.fixture
def trained(monkeypatch):
    """Note what is trained instead of training it; the accuracy is a tenth of the seed."""
    asked = []

    def train(mixer, question, seed, settings):
        asked.append((mixer, question, seed, settings))
        return Outcome(seed / 10, 1, 1.0, 1)

    monkeypatch.setattr(quality, "train", train)
    return asked


def test_it_is_the_mean_over_seeds(trained):
    settings = Settings(steps=3)
    assert quality_on("induction", seeds=3, settings=settings)(Softmax()) == pytest.approx(0.1)
    assert [(question, seed, given) for _, question, seed, given in trained] == [
        (QUESTIONS["induction"], seed, settings) for seed in range(3)
    ]


def test_layers_attend_by_the_mechanism_or_under_the_mask(trained):
    measure = quality_on("MQAR")
    linear = Linear()
    for one in (linear, Window(3, 5), Nystrom(4)):
        measure(one)
    layers = [mixer.make(64, 32, 0) for mixer, *_ in trained]
    assert all(isinstance(layer, MultiHeadAttention) for layer in layers)
    assert isinstance(layers[0].mechanism, Linear)
    assert layers[0].mechanism is not linear
    assert layers[0].mask == Causal()
    assert (layers[1].mask.to_dense(9) == (Window(3, 0)).to_dense(9)).all()
    assert layers[2].mask is None
    assert [mixer.sees_later for mixer, *_ in trained] == [False, False, True]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "same"), sampled([pytest.param("window", sliding_window(8)), pytest.param("full", Softmax())], 2)
)
def test_it_is_the_accuracy_of_the_mixer_of_that_name(name, same):
    settings = Settings(steps=20, texts=128, fresh=32)
    expected = train(MIXERS[name], QUESTIONS["MQAR"], 0, settings)
    assert quality_on("MQAR", settings=settings)(same) == expected.accuracy


def test_a_mechanism_that_would_read_the_answers_has_no_quality(trained):
    assert math.isnan(quality_on("induction")(Nystrom(4)))
    assert trained == []


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"quality_on: question must be one of MQAR, induction, .*; got MQR"):
        quality_on("MQR")
    with pytest.raises(TypeError, match="quality_on: question must be the name of a task or a Question; got 3"):
        quality_on(3)
    with pytest.raises(ValueError, match="quality_on: seeds must be an int of at least 1; got 0"):
        quality_on(seeds=0)
    with pytest.raises(TypeError, match="mechanism must be a mechanism or a mask; got 'window'"):
        quality_on()("window")


@pytest.mark.slow
def test_quality_tells_who_recalls_from_who_cannot():
    """The passkey is learned by exact attention within 200 steps, and not by a window that seldom reaches the key."""
    quality = quality_on("passkey")
    assert quality(Softmax()) >= 0.98
    assert quality(sliding_window(8)) <= 0.5
