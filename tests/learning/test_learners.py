"""Learners differ in what mixes their tokens, and in nothing else."""

import pytest
import torch
from tests.sampled import sampled

from saccade.learning import MIXERS, QUESTIONS, Learner, Mixer, Settings, train

SHORT = Settings(steps=3, texts=64, fresh=16, batch_size=4, ask_every=2)


@pytest.mark.parametrize("name", MIXERS)
def test_they_have_as_many_parameters(name):
    sizes = [sum(x.numel() for x in Learner(mixer, 40, 32).parameters()) for mixer in (MIXERS["full"], MIXERS[name])]
    assert abs(sizes[1] / sizes[0] - 1) < 0.005


@torch.no_grad()
@pytest.mark.parametrize("name", MIXERS)
def test_a_token_sees_later_ones_only_where_it_is_said(name):
    torch.manual_seed(0)
    model = Learner(MIXERS[name], 40, 32).double()
    tokens = torch.randint(40, (2, 32))
    other = tokens.clone()
    other[:, 20:] = (other[:, 20:] + 7) % 40
    difference = (model(tokens) - model(other)).abs().amax((0, 2))
    assert difference[20:].min() > 0
    # An FFT mixes all tokens, by rounding.
    assert (difference[:20].max() > 1e-12) == MIXERS[name].sees_later


@torch.no_grad()
@pytest.mark.parametrize("name", MIXERS)
def test_logits_are_those_that_were_asked_for(name):
    model = Learner(MIXERS[name], 40, 32)
    tokens, asked = torch.randint(40, (3, 32)), torch.rand(3, 32) > 0.7
    torch.testing.assert_close(model(tokens, asked), model(tokens)[asked])


@pytest.mark.ci
@pytest.mark.parametrize("name", sampled(MIXERS, 6))
def test_a_run_is_decided_by_its_seed(name):
    before = torch.get_rng_state()
    one, again = (train(MIXERS[name], QUESTIONS["MQAR"], 5, SHORT) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert one._replace(seconds=0) == again._replace(seconds=0)
    assert one.steps == 3
    assert one.parameters == sum(x.numel() for x in Learner(MIXERS[name], 128, 64).parameters())


@pytest.mark.slow
def test_a_run_ends_where_the_task_is_learned():
    learned = train(MIXERS["full, 1 head"], QUESTIONS["passkey"], 0, Settings(texts=2048))
    assert learned.accuracy >= 0.99
    assert learned.steps < 600


def test_wrong_trainings_are_refused():
    with pytest.raises(ValueError, match="not attend to later tokens in a task whose texts contain the answers"):
        train(MIXERS["Linformer"], QUESTIONS["induction"], 0, SHORT)
    with pytest.raises(ValueError, match="mixer must have fewer than 49152 parameters; got 262144"):
        Learner(Mixer(lambda width, length, layer: torch.nn.Linear(512, 512, bias=False)), 40, 32)
    with pytest.raises(ValueError, match=r"settings\.steps must be an int of at least 1; got 0"):
        train(MIXERS["full"], QUESTIONS["MQAR"], 0, Settings(steps=0))
    with pytest.raises(ValueError, match=r"settings\.learning_rate must .*; got -1"):
        train(MIXERS["full"], QUESTIONS["MQAR"], 0, Settings(learning_rate=-1.0))
