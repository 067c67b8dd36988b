"""Feed-forward networks, layers and stacks: their formulas, what they pass on, and what they refuse."""

import pytest
import torch
from torch import nn as tnn
from torch.nn import functional as F

from saccade import masks
from saccade.caches import Cache, CrossCache, KVCache
from saccade.nn import DecoderLayer, DecoderStack, EncoderLayer, EncoderStack, FeedForward, MultiHeadAttention
from saccade.positions import Rotary


def scattered(module):
    """Weights that are neither 0 nor 1, so that a part left out shows."""
    for parameter in module.parameters():
        tnn.init.normal_(parameter, std=0.3)
    return module.double().eval()


BENDS = {
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: x * (x > 0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


@pytest.mark.parametrize("projection_bias", [True, False])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", BENDS)
def test_feed_forward_is_its_formula(activation, gated, projection_bias):
    part = scattered(FeedForward(6, 10, activation=activation, gated=gated, projection_bias=projection_bias))
    assert sum(p.dim() == 1 for p in part.parameters()) == (2 + gated) * projection_bias
    x = torch.randn(2, 3, 6, dtype=torch.float64)

    def linear(name, x):
        own = part.get_submodule(name)
        return x @ own.weight.T + (own.bias if projection_bias else 0)

    bend = BENDS[activation]
    inner = bend(linear("gate", x)) * linear("expand", x) if gated else bend(linear("expand", x))
    torch.testing.assert_close(part(x), linear("contract", inner))


def test_feed_forward_drops_inner_channels_in_training_only():
    torch.manual_seed(0)
    part = FeedForward(1, 2000, activation="relu", dropout_p=0.25, projection_bias=False)
    tnn.init.ones_(part.expand.weight)
    tnn.init.constant_(part.contract.weight, 1 / 2000)
    x = torch.ones(1, 1)
    assert part(x).item() == pytest.approx(1, rel=0.1)
    assert not torch.equal(part(x), part(x))
    assert part.eval()(x).item() == pytest.approx(1, rel=1e-4)


def norm_of(module, x, norm):
    if norm == "rms":
        return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * module.weight
    centred = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-3).sqrt() * module.weight
    return centred + module.bias if norm == "layer" else centred


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("norm", ["layer", "layer_without_bias", "rms"])
def test_layers_are_their_formulas(norm, norm_first):
    options = {"norm": norm, "norm_eps": 1e-3, "norm_first": norm_first}
    attention = MultiHeadAttention(8, 2, mask=masks.Causal(), rotary=Rotary(4))
    cross = MultiHeadAttention(8, 2, context_dim=5)
    feed_forward = FeedForward(8, 12)
    layer = scattered(DecoderLayer(attention, feed_forward, cross_attention=cross, **options))
    encoder_layer = EncoderLayer(attention, feed_forward, **options).double().eval()
    encoder_layer.load_state_dict({k: v for k, v in layer.state_dict().items() if "cross" not in k})
    x, context = torch.randn(2, 5, 8).double(), torch.randn(2, 7, 5).double()

    def add(x, name, part):
        own = getattr(layer, f"{name}_norm")
        if norm_first:
            return x + part(norm_of(own, x, norm))
        return norm_of(own, x + part(x), norm)

    attended = add(x, "attention", attention)
    torch.testing.assert_close(encoder_layer(x), add(attended, "feed_forward", feed_forward))
    expected = add(attended, "cross_attention", lambda x: cross(x, context))
    torch.testing.assert_close(layer(x, context), add(expected, "feed_forward", feed_forward))


def decoder(num_layers=2, *, cross=False, norm_first=True, mask=None):
    layers = [
        DecoderLayer(
            MultiHeadAttention(8, 4, num_kv_heads=2, mask=masks.Causal() if mask is None else mask, rotary=Rotary(2)),
            FeedForward(8, 12, gated=True),
            cross_attention=MultiHeadAttention(8, 2, context_dim=5) if cross else None,
            norm="rms",
            norm_first=norm_first,
        )
        for _ in range(num_layers)
    ]
    return scattered(DecoderStack(layers, final_norm=tnn.LayerNorm(8)))


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("mask", [masks.Causal(), masks.sliding_window(3)], ids=str)
@pytest.mark.parametrize("cross", [False, True])
def test_any_split_equals_the_full_run(cross, mask, norm_first):
    stack = decoder(cross=cross, mask=mask, norm_first=norm_first)
    x = torch.randn(2, 9, 8).double()
    context = torch.randn(2, 7, 5).double() if cross else None
    facts = {"context_mask": masks.Window(4, 2) & masks.Padding([7, 5])} if cross else {}
    with torch.no_grad():
        full = stack(x, context, **facts)
        cache = stack.new_cache()
        parts, start = [], 0
        for length in (4, 1, 3, 1):
            # The context is remembered after the first call.
            own = context if start == 0 else None
            parts.append(stack(x[:, start : start + length], own, cache=cache, **facts))
            start += length
    torch.testing.assert_close(torch.cat(parts, 1), full)
    assert cache.length == 9


def test_positions_reach_the_attention():
    stack = decoder(1)
    x = torch.randn(1, 4, 8).double()
    apart = stack(x, positions=torch.tensor([0, 5, 9, 20]))
    assert not torch.allclose(apart, stack(x))
    torch.testing.assert_close(stack(x, positions=range(30, 34)), stack(x))  # rotary knows differences only
    holes = stack(torch.cat([x[:, :2], x], 1), positions=torch.tensor([-1, -1, 0, 1, 2, 3]))[:, 2:]
    torch.testing.assert_close(holes, stack(x))
    layer = EncoderLayer(MultiHeadAttention(8, 2, rotary=Rotary(4)), FeedForward(8, 8)).double().eval()
    torch.testing.assert_close(layer(x, positions=range(7, 11)), layer(x))
    assert not torch.allclose(layer(x, positions=torch.tensor([0, 5, 9, 20])), layer(x))


@pytest.mark.parametrize("norm_first", [True, False])
def test_matrices_are_those_that_forward_multiplies_by(norm_first):
    stack = decoder(cross=True, norm_first=norm_first)
    x, context = torch.randn(1, 4, 8).double(), torch.randn(1, 6, 5).double()
    facts = {"mask": masks.Window(2, 0), "context_mask": masks.Padding([5])}
    seen, across = [], []
    for layer in stack.layers:
        layer.attention.mechanism.register_forward_hook(lambda m, args, matrix: seen.append(matrix.to_dense()))
        layer.cross_attention.mechanism.register_forward_hook(lambda m, args, matrix: across.append(matrix.to_dense()))
    with torch.no_grad():
        stack(x, context, **facts)
        expected, expected_across = list(seen), list(across)
        for matrix, own in zip(stack.matrices(x, context, **facts), expected, strict=True):
            torch.testing.assert_close(matrix.to_dense(), own)
        torch.testing.assert_close(stack.layers[0].cross_matrix(x, context, **facts).to_dense(), expected_across[0])


def test_encoder_stacks_run_their_layers_in_order():
    layers = [EncoderLayer(MultiHeadAttention(8, 2), FeedForward(8, 8)) for _ in range(2)]
    stack = scattered(EncoderStack(layers, final_norm=tnn.LayerNorm(8)))
    x, mask = torch.randn(2, 5, 8).double(), masks.Padding([5, 3])
    hidden = layers[1](layers[0](x, mask=mask), mask=mask)
    torch.testing.assert_close(stack(x, mask=mask), stack.final_norm(hidden))
    torch.testing.assert_close(EncoderStack(layers)(x, mask=mask), hidden)
    for matrix, own in zip(
        stack.matrices(x, mask=mask),
        [layers[0].matrix(x, mask=mask), layers[1].matrix(layers[0](x, mask=mask), mask=mask)],
        strict=True,
    ):
        torch.testing.assert_close(matrix.to_dense(), own.to_dense())


def test_dropout_in_training_only_and_on_every_part():
    layer = DecoderLayer(
        MultiHeadAttention(8, 2), FeedForward(8, 8), cross_attention=MultiHeadAttention(8, 2), dropout_p=0.999999
    )
    x, context = torch.randn(1, 4, 8), torch.randn(1, 4, 8)
    torch.testing.assert_close(layer(x, context), x)  # all that the parts add is dropped
    assert not torch.allclose(layer.eval()(x, context), x)
    layer = EncoderLayer(MultiHeadAttention(8, 2), FeedForward(8, 8), norm_first=False, dropout_p=0.999999)
    torch.testing.assert_close(layer(x), layer.feed_forward_norm(layer.attention_norm(x)))


def test_gradients_reach_every_parameter():
    stack = decoder(cross=True).train()
    stack(torch.randn(1, 4, 8).double(), torch.randn(1, 3, 5).double()).pow(2).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in stack.parameters())


def part(**options):
    return MultiHeadAttention(8, 2, **options)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: FeedForward(0, 3), "FeedForward: embed_dim must be an int of at least 1; got 0"),
        (lambda: FeedForward(3, True), "FeedForward: hidden_dim must be an int of at least 1; got True"),
        (lambda: FeedForward(3, 3, activation="tanh"), "activation must be one of 'gelu', .*; got 'tanh'"),
        (lambda: FeedForward(3, 3, dropout_p=1.0), "FeedForward: dropout_p must be at least 0 and below 1"),
        (lambda: EncoderLayer(part(), FeedForward(9, 8)), "feed_forward must have embed_dim 8, .*; got 9"),
        (lambda: EncoderLayer(part(), FeedForward(8, 8), norm="batch"), "norm must be one of 'layer', .*; got 'batch'"),
        (
            lambda: EncoderLayer(part(), FeedForward(8, 8), norm_eps=0),
            "norm_eps must be a finite number above 0; got 0",
        ),
        (lambda: EncoderLayer(part(), FeedForward(8, 8), norm_eps=float("nan")), "norm_eps must be .*; got nan"),
        (lambda: EncoderLayer(part(), FeedForward(8, 8), dropout_p=-0.1), "EncoderLayer: dropout_p must be"),
        (
            lambda: DecoderLayer(part(), FeedForward(8, 8), cross_attention=MultiHeadAttention(6, 2)),
            "cross_attention must have embed_dim 8, as the first attention; got 6",
        ),
        *(
            (lambda size=size: MultiHeadAttention(8, 2, context_dim=size), f"context_dim must be an int .*; got {size}")
            for size in (-1, 0, 2.5, True)
        ),
        (lambda: FeedForward(8, 8, activation=[]), r"FeedForward: activation must be one of 'gelu', .*; got \[\]"),
        (
            lambda: EncoderLayer(part(), FeedForward(8, 8), norm=[]),
            r"EncoderLayer: norm must be one of 'layer', .*; got",
        ),
        (
            lambda: EncoderLayer(part(), FeedForward(8, 8), norm_eps=10**400),
            "norm_eps must be a finite number above 0; got 10",
        ),
        (lambda: EncoderStack([]), "EncoderStack: layers must contain at least one layer; got none"),
        (
            lambda: DecoderStack([decoder(1).layers[0], decoder(1, cross=True).layers[0]]),
            "layers must all have cross_attention, or all have none; got layers with and without cross_attention",
        ),
        (lambda: decoder(1)(torch.zeros(1, 1, 8).double(), torch.zeros(1, 1, 5).double()), "context must be None in a"),
        (lambda: decoder(1, cross=True)(torch.zeros(1, 1, 8).double()), "context must be given to a layer with"),
        (
            lambda: decoder(2)(torch.zeros(1, 1, 8).double(), cache=Cache([KVCache()])),
            "DecoderStack: cache must contain the caches of 2 layers; got 1",
        ),
    ],
)
def test_bad_values_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: EncoderLayer(tnn.Linear(8, 8), FeedForward(8, 8)), "EncoderLayer: attention must be a .*; got Linear"),
        (lambda: EncoderLayer(part(), 32), "EncoderLayer: feed_forward must be a module; got int"),
        (lambda: EncoderLayer(part(), FeedForward(8, 8), norm_first=1), "norm_first must be True or False; got 1"),
        (lambda: DecoderLayer(part(), FeedForward(8, 8), cross_attention=8), "cross_attention must be a .*; got int"),
        (lambda: FeedForward(8, 8, gated="no"), "FeedForward: gated must be True or False; got 'no'"),
        (lambda: FeedForward(8, 8, projection_bias=1), "FeedForward: projection_bias must be True or False; got 1"),
        (lambda: MultiHeadAttention(8, 2, projection_bias="no"), "projection_bias must be True or False; got 'no'"),
        (lambda: EncoderStack(5), "EncoderStack: layers must be an iterable of EncoderLayer; got int"),
        (lambda: DecoderStack(decoder(1).layers, final_norm="rms"), "final_norm must be a module or None; got str"),
        (lambda: EncoderStack(decoder(1).layers), "layers must be instances of EncoderLayer; got DecoderLayer"),
        (lambda: decoder(1)(torch.zeros(1, 1, 8).double(), cache=KVCache()), "cache must be a Cache or None; got KV"),
        (
            lambda: decoder(1).layers[0](torch.zeros(1, 1, 8).double(), cache=Cache([KVCache()])),
            "DecoderLayer: cache must be the cache of a layer, or None; got Cache",
        ),
        (
            lambda: decoder(1, cross=True).layers[0](
                torch.zeros(1, 1, 8).double(), torch.zeros(1, 1, 5).double(), cache=Cache([CrossCache(), KVCache()])
            ),
            r"cache must be a Cache\(\[KVCache\(\), CrossCache\(\)\]\), or None; got Cache",
        ),
    ],
)
def test_bad_types_are_named(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_any_module_may_stand_in_a_norm_s_or_a_network_s_place():
    layer = EncoderLayer(part(), tnn.Identity()).eval()
    layer.attention_norm = tnn.Identity()
    layer.feed_forward_norm = tnn.Identity()
    x = torch.randn(1, 3, 8)
    torch.testing.assert_close(layer(x), 2 * (x + layer.attention(x)))
    assert F.relu(x).shape == layer(x).shape
