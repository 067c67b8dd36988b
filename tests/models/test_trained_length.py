"""The warning about text beyond the length that a model was trained on."""

import warnings

import pytest
import torch

from saccade import caches, masks, models
from saccade.models import UntrainedLengthWarning, small_decoder
from saccade.models.trained_length import longest_reach

TOKENS = torch.arange(300)[None] % 2000
TRAINED = 256


def run(model, tokens=TOKENS, **facts):
    with torch.no_grad():
        model.hidden(tokens, **facts)


def test_a_long_text_warns_once_for_each_model():
    model = small_decoder()
    assert model.config.max_len == TRAINED
    run(model, TOKENS[:, :TRAINED])
    with pytest.warns(UntrainedLengthWarning, match=r"Decoder: the text has 300 tokens, .* trained on 256") as found:
        run(model)
    assert len(found) == 1
    run(model)  # warnings are errors in these tests
    with pytest.warns(UntrainedLengthWarning):
        run(small_decoder())


def test_steps_with_a_cache_warn_when_they_pass_the_length():
    model = small_decoder()
    cache = model.new_cache()
    run(model, TOKENS[:, :250], cache=cache)
    run(model, TOKENS[:, 250:256], cache=cache)
    with pytest.warns(UntrainedLengthWarning, match="257 tokens"):
        run(model, TOKENS[:, 256:257], cache=cache)


@pytest.mark.parametrize(
    "facts",
    [
        {"mask": masks.sliding_window(TRAINED)},
        {"mask": masks.Documents([150, 150])},
        {"mask": masks.Documents([280, 20]) & masks.Window(200, 0)},
        {"positions": range(280, 300)},
    ],
    ids=str,
)
def test_trained_distances_do_not_warn(facts):
    run(small_decoder(), TOKENS[:, :20] if "positions" in facts else TOKENS, **facts)


@pytest.mark.parametrize(
    "facts",
    [
        {"mask": masks.sliding_window(TRAINED + 1)},
        {"mask": masks.Documents([260, 40])},
        {"mask": masks.streaming(4, 100)},
    ],
    ids=str,
)
def test_longer_distances_warn(facts):
    with pytest.warns(UntrainedLengthWarning):
        run(small_decoder(), **facts)


def test_a_cache_that_counts_positions_inside_does_not_warn():
    model = small_decoder()
    layers = [layer.attention for layer in model.stack.layers]
    run(model, cache=caches.Cache(caches.SinkWindowCache(4, 100, rotary=layer.rotary) for layer in layers))
    with pytest.warns(UntrainedLengthWarning):
        run(model, cache=caches.Cache(caches.SinkWindowCache(4, 100) for _ in layers))


def test_models_that_were_not_loaded_do_not_warn():
    config = models.DecoderConfig(
        vocab_size=2000, max_len=32, embed_dim=16, num_heads=2, num_layers=1, feed_forward_dim=16
    )
    with warnings.catch_warnings(action="error"):
        run(models.Decoder(config).eval())


@pytest.mark.parametrize(
    "mask, reach",
    [
        (masks.Causal(), 30),
        (masks.sliding_window(7), 7),
        (masks.Causal() & masks.Window(99, 0), 30),
        (masks.Causal() & masks.Documents([5, 11, 14]), 14),
        (masks.Documents([5, 25], rule=masks.sliding_window(6)), 6),
    ],
    ids=str,
)
def test_the_longest_reach_is_that_of_the_dense_mask(mask, reach):
    dense = mask.to_dense(30)[0, 0]
    i, j = torch.nonzero(dense, as_tuple=True)
    assert longest_reach(mask, 30) == reach >= int((i - j).max()) + 1
    assert reach == int((i - j).max()) + 1


@pytest.mark.parametrize("make", [models.minilm, small_decoder], ids=lambda x: x.__name__)
def test_matrices_have_no_gradients(make):
    for matrix in make().matrices(TOKENS[:, :9]):
        assert not matrix.inputs.query.requires_grad
        assert not matrix.to_dense().requires_grad
