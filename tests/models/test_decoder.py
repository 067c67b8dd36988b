"""Tests of a decoder's results, and of inputs that it takes and refuses, for any weights."""

import math

import pytest
import torch
from torch.nn import functional as F

from saccade import masks, positions
from saccade.caches import Cache, KVCache, padded_positions
from saccade.models import Decoder, DecoderConfig

SIZES = {"vocab_size": 20, "max_len": 24, "embed_dim": 16, "num_heads": 4, "num_layers": 2, "feed_forward_dim": 24}
PLAIN_NETWORK = {"activation": "gelu_tanh", "gated": False, "norm": "layer", "feed_forward_bias": True}
CONFIGS = {
    "llama": {},
    "grouped": {"num_kv_heads": 2, "attention_bias": True, "tied": False},
    "window": {"mask": masks.sliding_window(3), "num_kv_heads": 1},
    "pattern": {"mask": masks.Window(2, 2) | masks.Global([0])},
    "yarn": {"rotary_scaling": positions.YaRN(2.0, 8), "rotary_base": 500.0},
    "gpt2": {"position_encoding": "learned", "attention_bias": True, **PLAIN_NETWORK},
    "relative": {"position_encoding": "relative", "norm": "layer", **PLAIN_NETWORK},
    "alibi": {"position_encoding": "alibi", "norm": "layer_without_bias", "gated": False, "activation": "relu"},
}


def decoder(name="llama", **changes):
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**{**SIZES, **CONFIGS[name], **changes}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # large enough that a wrong detail shows
    return model.double().eval()


def some_tokens(batch=2, length=11):
    return torch.randint(0, 20, (batch, length), generator=torch.Generator().manual_seed(1))


def by_hand(model, tokens):
    """Compute the same network for one text, written out."""
    config, state = model.config, dict(model.named_parameters())
    n, heads, kv_heads = tokens.shape[0], config.num_heads, config.kv_heads
    head_dim = config.embed_dim // heads
    place = torch.arange(n)

    def norm(x, name):
        if config.norm == "rms":
            return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * state[f"{name}.weight"]
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + config.norm_eps).sqrt()
        return x * state[f"{name}.weight"] + state.get(f"{name}.bias", 0)

    def linear(x, name):
        return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0)

    def turned(x):
        scaling = config.rotary_scaling or positions.Linear(1.0)
        angles = place[:, None] * scaling.frequencies(config.rotary_base, head_dim, torch.float64)
        a, b = x.chunk(2, -1)
        return scaling.magnitude * torch.cat(
            [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1
        )

    bend = {"silu": F.silu, "relu": F.relu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}[config.activation]
    x = state["embedding.weight"][tokens]
    if config.position_encoding == "learned":
        x = x + state["position.weight"][:n]
    allowed = torch.ones(n, n).tril().bool()
    if config.mask is not None:
        allowed &= config.mask.to_dense(n)[0, 0]
    for index in range(config.num_layers):
        here = f"stack.layers.{index}"
        y = norm(x, f"{here}.attention_norm")
        q, k, v = (linear(y, f"{here}.attention.{part}_projection") for part in ("query", "key", "value"))
        outs = []
        for head in range(heads):
            group = head // (heads // kv_heads)
            own_q = q[:, head * head_dim : (head + 1) * head_dim]
            own_k, own_v = (z[:, group * head_dim : (group + 1) * head_dim] for z in (k, v))
            if config.position_encoding == "rotary":
                own_q, own_k = turned(own_q), turned(own_k)
            scores = own_q @ own_k.T / math.sqrt(head_dim)
            if config.position_encoding == "alibi":
                scores = scores - 2 ** (-8 * (head + 1) / heads) * (place[:, None] - place).abs()
            if config.position_encoding == "relative":
                vectors = state[f"{here}.attention.mechanism.bias.weight"][head]
                apart = (place[:, None] - place).clamp(0, config.max_len - 1)  # keys behind are hidden
                far = (own_q[:, None] * vectors[config.max_len - 1 - apart]).sum(-1)
                scores = scores + far / math.sqrt(head_dim)
            outs.append(scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ own_v)
        x = x + linear(torch.cat(outs, -1), f"{here}.attention.output_projection")
        y = norm(x, f"{here}.feed_forward_norm")
        inner = bend(linear(y, f"{here}.feed_forward.gate")) if config.gated else 1
        wide = linear(y, f"{here}.feed_forward.expand")
        inner = inner * wide if config.gated else bend(wide)
        x = x + linear(inner, f"{here}.feed_forward.contract")
    head = state["embedding.weight"] if config.tied else state["head.weight"]
    return norm(x, "stack.final_norm") @ head.T


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_network_written_out(name):
    model, tokens = decoder(name), some_tokens()
    with torch.no_grad():
        got = model(tokens)
        for row in range(2):
            torch.testing.assert_close(got[row], by_hand(model, tokens[row]))


@pytest.mark.parametrize("name", CONFIGS)
def test_any_split_equals_the_full_run(name):
    model, tokens = decoder(name), some_tokens()
    with torch.no_grad():
        full = model(tokens)
        for lengths in ((5, 1, 1, 4), (1,) * 11, (10, 1)):
            cache = model.new_cache()
            parts = [model(part, cache=cache) for part in tokens.split(lengths, 1)]
            torch.testing.assert_close(torch.cat(parts, 1), full)
            assert cache.length == 11


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_ragged_batch_equals_its_texts_one_by_one(name, side):
    model, texts = decoder(name), some_tokens(3, 9)
    lengths, steps = (6, 2, 4), 3
    place = padded_positions(lengths, side=side)
    prompt = torch.zeros_like(place)
    for row, length in enumerate(lengths):
        prompt[row][place[row] >= 0] = texts[row, :length]
    with torch.no_grad():
        alone = [model(texts[row : row + 1, : length + steps])[0] for row, length in enumerate(lengths)]
        cache = model.new_cache()
        got = model(prompt, positions=place, cache=cache)
        for row, length in enumerate(lengths):
            torch.testing.assert_close(got[row][place[row] >= 0], alone[row][:length])
        torch.testing.assert_close(model(prompt, positions=place)[place >= 0], got[place >= 0])
        for step in range(steps):
            new = torch.stack([texts[row, length + step] for row, length in enumerate(lengths)])[:, None]
            got = model(new, cache=cache)
            for row, length in enumerate(lengths):
                torch.testing.assert_close(got[row, 0], alone[row][length + step])


def test_the_vocabulary_s_projection_can_be_saved():
    model, tokens = decoder("grouped"), some_tokens()
    with torch.no_grad():
        full = model(tokens)
        torch.testing.assert_close(model.logits(model.hidden(tokens)[:, -1:]), full[:, -1:])
        cache = model.new_cache(max_len=11)
        model.hidden(tokens[:, :7], cache=cache)
        torch.testing.assert_close(model(tokens[:, 7:], cache=cache), full[:, 7:])


def test_packed_texts_equal_their_texts():
    model, tokens = decoder("window"), some_tokens(1, 9)
    with torch.no_grad():
        apart = torch.cat([model(tokens[:, :4]), model(tokens[:, 4:])], 1)
        packed = model(tokens, mask=masks.Documents([4, 5]))
        torch.testing.assert_close(packed, apart)
        learned = decoder("gpt2")
        apart = torch.cat([learned(tokens[:, :4]), learned(tokens[:, 4:])], 1)
        torch.testing.assert_close(learned(tokens, mask=masks.Documents([4, 5])), apart)


def test_masks_and_positions_reach_every_layer():
    model, tokens = decoder(num_layers=3), some_tokens(1, 6)
    with torch.no_grad():
        seen = []
        for layer in model.stack.layers:
            layer.attention.mechanism.register_forward_hook(lambda m, args, matrix: seen.append(matrix.to_dense()))
        facts = {"mask": masks.Window(1, 0), "positions": torch.tensor([0, 1, 2, 5, 6, 7])}
        model(tokens, **facts)
        expected = list(seen)
        matrices = model.matrices(tokens, **facts)
        assert len(matrices) == len(expected) == 3
        for matrix, own in zip(matrices, expected, strict=True):
            torch.testing.assert_close(matrix.to_dense(), own)
            lines = (own[0, 0] > 0).int().tolist()
            assert lines[3] == [0, 0, 0, 1, 0, 0]  # nobody stands at 4
            assert lines[4] == [0, 0, 0, 1, 1, 0]


def test_a_mask_that_sees_later_tokens_is_cut():
    assert str(DecoderConfig(**SIZES, mask=masks.Window(2, 2)).causal_mask) == "Causal() & Window(left=2, right=2)"
    window = masks.sliding_window(4)
    assert DecoderConfig(**SIZES, mask=window).causal_mask is window
    assert DecoderConfig(**SIZES).causal_mask == masks.Causal()


def test_training_reaches_every_parameter_and_learns():
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**{**SIZES, "tied": False}, dropout_p=0.1, attention_dropout_p=0.1)).train()
    tokens = some_tokens(4, 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(20), rel=0.05)
    assert losses[-1] < 0.5 * losses[0]
    assert not torch.equal(model(tokens), model(tokens))


def test_a_new_decoder_starts_small_and_deep_ones_smaller():
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**{**SIZES, "num_layers": 8, "embed_dim": 64, "feed_forward_dim": 256}))
    layer = model.stack.layers[5]
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert layer.feed_forward.expand.weight.std().item() == pytest.approx(0.02, rel=0.1)
    for linear in (layer.feed_forward.contract, layer.attention.output_projection):
        assert linear.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)


def test_failed_calls_leave_the_cache_as_it_was():
    model, tokens = decoder("gpt2"), some_tokens(1, 11)
    with torch.no_grad():
        cache = model.new_cache()
        model(tokens, cache=cache)
        with pytest.raises(ValueError, match="text must be at most 24 long; got 33"):
            model(some_tokens(1, 22), cache=cache)
        assert cache.length == 11
        with pytest.raises(ValueError, match="tokens must be from 0 to 19, the vocabulary; got 20"):
            model(torch.tensor([[20]]), cache=cache)
        assert cache.length == 11


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vocab_size": 0}, "DecoderConfig: vocab_size must be an int of at least 1; got 0"),
        ({"num_layers": True}, "num_layers must be an int of at least 1; got True"),
        ({"num_kv_heads": 0}, "num_kv_heads must be an int of at least 1; got 0"),
        ({"num_heads": 5}, "num_heads must divide embed_dim 16; got 5"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads 4; got 3"),
        ({"position_encoding": "none"}, "position_encoding must be one of 'rotary', .*, 'relative'; got 'none'"),
        ({"activation": "swish"}, "activation must be one of 'gelu', .*; got 'swish'"),
        ({"norm": "batch"}, "norm must be one of 'layer', .*; got 'batch'"),
        ({"num_heads": 16}, r"embed_dim / num_heads must be even for rotary positions; got 16 / 16"),
        (
            {"position_encoding": "alibi", "rotary_scaling": positions.Linear(2.0)},
            "rotary_scaling must be None unless positions are rotary",
        ),
        ({"dropout_p": 1.0}, "DecoderConfig: dropout_p must be a finite number of at least 0 and below 1"),
        ({"attention_dropout_p": -0.5}, "attention_dropout_p must be a finite number of at least 0 and below 1"),
    ],
    ids=str,
)
def test_bad_sizes_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**{**SIZES, **changes})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tied": 1}, "tied must be True or False; got 1"),
        ({"mask": "causal"}, "mask must be a Mask or None; got str"),
        ({"rotary_scaling": 2.0}, "rotary_scaling must be a Scaling or None; got float"),
        ({"end_tokens": [1]}, "end_tokens must be a tuple of ints; got list"),
    ],
    ids=str,
)
def test_bad_kinds_are_named(changes, message):
    with pytest.raises(TypeError, match=message):
        DecoderConfig(**{**SIZES, **changes})


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda m: m([[1]]), TypeError, "Decoder: tokens must be a tensor; got list"),
        (lambda m: m(torch.ones(1, 2)), TypeError, "Decoder: tokens must be int64 or int32"),
        (
            lambda m: m(torch.ones(2, dtype=torch.int64)),
            ValueError,
            r"Decoder: tokens must have shape \[batch, len\]; got \[2\]",
        ),
        (lambda m: m(torch.tensor([[-1]])), ValueError, "tokens must be from 0 to 19, the vocabulary; got -1"),
        (lambda m: m(some_tokens(), positions=range(3)), ValueError, "positions must hold 11 positions; got 3"),
        (lambda m: m(some_tokens(), cache=KVCache()), TypeError, "cache must be a Cache or None; got KVCache"),
        (lambda m: m(some_tokens(), cache=Cache([KVCache()])), ValueError, "contain the caches of 2 layers; got 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_calls_are_named(call, kind, message):
    for name in ("llama", "gpt2"):
        with pytest.raises(kind, match=message):
            call(decoder(name))
