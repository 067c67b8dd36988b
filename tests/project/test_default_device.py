"""Calls, layers and generation give the same, whatever the default device is."""

import pytest
import torch

import saccade as sc
from saccade import masks, statistics
from saccade.models import Decoder, DecoderConfig, Sampler, generate
from saccade.nn import MultiHeadAttention

QUERY, KEY, VALUE = torch.randn(3, 2, 2, 8, 4)


def decoder(**options):
    return Decoder(DecoderConfig(30, 32, 16, 2, num_layers=1, feed_forward_dim=32, **options)).eval()


def cached(layer, x):
    cache = layer.new_cache()
    return torch.cat([layer(x[:, :5], cache=cache), layer(x[:, 5:6], cache=cache), layer(x[:, 6:], cache=cache)], 1)


NUMBERS = [1, 2, 1, 2, 1, 2, 1, 2]
CALLS = {
    "positions in lists": lambda: sc.attention(
        QUERY, KEY, VALUE, masks.Causal(), q_positions=NUMBERS, kv_positions=NUMBERS
    ),
    "singular values": lambda: statistics.singular_values(sc.AttentionMatrix(QUERY, KEY, masks.Causal()), 3)[0],
    "induction": lambda: sc.AttentionMatrix(QUERY, KEY, masks.Causal()).compute(
        statistics.InductionMass(tuple(NUMBERS))
    )[0],
    "dropout": lambda: sc.attention(QUERY, KEY, VALUE, masks.Causal(), dropout_p=0.5),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    torch.manual_seed(3)
    expected = CALLS[name]()
    torch.manual_seed(3)
    with torch.device("meta"):
        assert torch.equal(CALLS[name](), expected)


@pytest.mark.parametrize("encoding", ["rotary", "alibi", "learned", "relative"])
def test_generation(encoding):
    model = decoder(position_encoding=encoding)
    expected = [generate(model, [[1, 2, 3], [4]], 5), generate(model, [[1, 2]], 5, sampler=Sampler(), seed=1)]
    with torch.device("meta"):
        found = [generate(model, [[1, 2, 3], [4]], 5), generate(model, [[1, 2]], 5, sampler=Sampler(), seed=1)]
    assert found == expected


def test_a_layer_with_a_cache():
    layer, x = MultiHeadAttention(16, 2, mask=masks.Causal() & masks.Window(3, 0)).eval(), torch.randn(2, 8, 16)
    expected = cached(layer, x)
    with torch.device("meta"):
        assert torch.equal(cached(layer, x), expected)


def test_a_noncausal_mask_with_a_cache_is_refused_on_any_default_device():
    layer = MultiHeadAttention(16, 2, mask=masks.Predicate(lambda b, h, q, kv: q + 1 >= kv)).eval()
    with torch.device("meta"), pytest.raises(ValueError, match="ausal"):
        layer(torch.zeros(1, 3, 16, device="cpu"), cache=layer.new_cache())
