"""A bias that comes with a call: added to the scores of that call, in layers too, with gradients."""

import re

import pytest
import torch
from torch.nn import functional as F

from saccade import masks, mechanisms, scorers
from saccade.nn import AttentionBlock, DecoderLayer, DecoderStack, EncoderLayer, EncoderStack, FeedForward
from saccade.nn import MultiHeadAttention as Attention
from saccade.positions import ALiBi
from saccade.recording import record
from saccade.statistics import Pooled
from saccade.support.errors import UnsupportedError


def inputs():
    torch.manual_seed(0)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    return x, torch.randn(2, 2, 6, 6, dtype=torch.float64, requires_grad=True)


def by_torch(attention, x, bias):
    """Torch's product of the same projections."""
    query, key, value = (
        own(x).unflatten(2, (2, 4)).transpose(1, 2)
        for own in (attention.query_projection, attention.key_projection, attention.value_projection)
    )
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    heads = F.scaled_dot_product_attention(query, key, value, bias.masked_fill(hidden, -torch.inf))
    return attention.output_projection(heads.transpose(1, 2).flatten(2))


def test_it_is_added_to_the_scores_of_the_call():
    x, bias = inputs()
    attention = Attention(8, 2, mask=masks.Causal()).double()
    out, expected = attention(x, bias=bias), by_torch(attention, x, bias)
    torch.testing.assert_close(out, expected)
    (own,), (theirs,) = (torch.autograd.grad(y.square().sum(), bias) for y in (out, expected))
    torch.testing.assert_close(own, theirs)
    seen, weights = attention.with_weights(x, bias=bias)
    torch.testing.assert_close(seen, out)
    torch.testing.assert_close(weights, attention.matrix(x, bias=bias).to_dense())
    assert not torch.allclose(attention(x), out)  # and stays with that call


def test_layers_hand_it_on():
    x, bias = inputs()
    attention = Attention(8, 2, mask=masks.Causal())
    block = AttentionBlock(8, 2, mask=masks.Causal()).double()
    torch.testing.assert_close(block(x, bias=bias), block.norm(x + by_torch(block.attention, x, bias)))
    for layer, stack in (
        (EncoderLayer(attention, FeedForward(8, 8)), EncoderStack),
        (DecoderLayer(attention, FeedForward(8, 8)), DecoderStack),
    ):
        whole = stack([layer]).double()
        middle = x + by_torch(attention, layer.attention_norm(x), bias)
        expected = middle + layer.feed_forward(layer.feed_forward_norm(middle))
        torch.testing.assert_close(whole(x, bias=bias), expected)
        (matrix,) = whole.matrices(x, bias=bias)
        torch.testing.assert_close(matrix.to_dense(), attention.matrix(layer.attention_norm(x), bias=bias).to_dense())


def test_steps_equal_the_full_run():
    x, _ = inputs()
    mechanism = mechanisms.Softmax(sink_logit=2)
    attention, bias = Attention(8, 2, mask=masks.Causal(), mechanism=mechanism).double(), ALiBi(2)
    cache = attention.new_cache()
    parts = [attention(x[:, start:stop], bias=bias, cache=cache) for start, stop in ((0, 3), (3, 4), (4, 6))]
    full = attention(x, bias=bias)
    torch.testing.assert_close(torch.cat(parts, 1), full)
    own, expected = (torch.autograd.grad(y.sum(), mechanism.sink_logit)[0] for y in (parts[2], full[:, 4:]))
    torch.testing.assert_close(own, expected)


REFUSED = {
    "tensor with a cache": (
        lambda x, bias: Attention(8, 2, mask=masks.Causal()).double()(
            x, bias=bias, cache=mechanisms.Softmax().new_cache()
        ),
        "bias must be a rule on positions with a cache; got Tensor",
    ),
    "no scores": (
        lambda x, bias: Attention(8, 2, mechanism=mechanisms.Linear()).double()(x, bias=bias),
        "Linear has no scores to add it to",
    ),
    "two": (
        lambda x, bias: Attention(8, 2, mechanism=mechanisms.Softmax(bias=ALiBi(2))).double()(x, bias=bias),
        "it already has a bias, and the call passes another",
    ),
    "shape": (lambda x, bias: Attention(8, 2).double()(x, bias=bias[..., :5]), "bias must"),
    "kind": (lambda x, bias: Attention(8, 2).double()(x, bias=3), "bias must be a tensor, a saccade positions.Bias"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bias_of_wrong_shape_is_refused(name):
    wrong, words = REFUSED[name]
    with pytest.raises((TypeError, ValueError, UnsupportedError), match=re.escape(words)):
        wrong(*inputs())


@pytest.mark.parametrize(
    "mechanism",
    [
        mechanisms.Softmax(),
        mechanisms.TopK(scorers.DotProducts(), 3),
        mechanisms.Differential(2),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_recording_hears_it(mechanism):
    x, bias = inputs()
    attention = Attention(8, 2, mask=masks.Causal(), mechanism=mechanism).double()
    with torch.no_grad(), record(attention, keep=Pooled(3)) as recording:
        attention(x, bias=bias)
    torch.testing.assert_close(
        recording["MultiHeadAttention"].compute(Pooled(3))[0], attention.matrix(x, bias=bias).compute(Pooled(3))[0]
    )


def test_hooks_of_the_mechanism_get_the_arguments_they_requested():
    mha, x, bias = Attention(16, 4), torch.randn(2, 6, 16), torch.randn(4, 6, 6)
    heard = []
    mha.mechanism.register_forward_hook(
        lambda module, args, kwargs, matrix: heard.append(sorted(kwargs)), with_kwargs=True
    )
    mha.mechanism.register_forward_pre_hook(lambda module, args: heard.append(len(args)))
    mha(x)
    mha(x, bias=bias)
    assert len(heard) == 4
    assert heard[:2] == heard[2:]
