"""replace_attention: equal outputs, losses and gradients, the same weights, and refusals by name."""

import copy

import pytest
import torch
from tests.integrations.replaceable_models import D, H, One, TimmForm, gpt2
from torch import nn
from transformers import BertConfig, BertModel, MistralConfig, MistralForCausalLM, T5Config, T5Model

import saccade as sc
from saccade import masks, mechanisms

B, L, S = 2, 7, 9
FLAGS = {
    "plain": {"batch_first": True},
    "length first": {},
    "learned key": {"batch_first": True, "add_bias_kv": True},
    "zero key": {"batch_first": True, "add_zero_attn": True},
    "both, length first": {"add_bias_kv": True, "add_zero_attn": True},
    "no bias": {"batch_first": True, "bias": False},
    "other widths": {"batch_first": True, "kdim": 6, "vdim": 5},
}
HIDDEN = torch.rand(L, S, generator=torch.Generator().manual_seed(1)) < 0.4
HIDDEN[:, 0] = False
PADDED = torch.arange(S) >= torch.tensor([[S], [5]])
MASKS = {
    "none": {},
    "bool": {"attn_mask": HIDDEN},
    "terms": {"attn_mask": torch.randn(L, S, dtype=torch.float64)},
    "per head": {"attn_mask": HIDDEN.repeat(B * H, 1, 1)},
    "padding": {"key_padding_mask": PADDED},
    "both": {"attn_mask": HIDDEN, "key_padding_mask": PADDED},
    "-inf": {"attn_mask": torch.zeros(L, S, dtype=torch.float64).masked_fill(HIDDEN, -torch.inf)},
}


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("mask", MASKS)
def test_every_flag_and_every_mask(flags, mask):
    torch.manual_seed(0)
    options = FLAGS[flags]
    model = One(**options)
    widths = (D, options.get("kdim", D), options.get("vdim", D))
    inputs = [torch.randn(B, n, width, dtype=torch.float64) for n, width in zip((L, S, S), widths, strict=True)]
    if not options.get("batch_first"):
        inputs = [x.transpose(0, 1) for x in inputs]
    weights = dict(model.named_parameters())
    for average in (True, False):
        expected = model(*inputs, average_attn_weights=average, **MASKS[mask])
        state = model.state_dict()
        changed = copy.deepcopy(model)
        assert [one.name for one in sc.replace_attention(changed)] == ["inner"]
        got = changed(*inputs, average_attn_weights=average, **MASKS[mask])
        torch.testing.assert_close(got[0], expected[0])
        torch.testing.assert_close(got[1], expected[1])
        assert changed.state_dict().keys() == state.keys()
    grads = torch.autograd.grad(expected[0].sin().sum(), list(weights.values()), allow_unused=True)
    found = torch.autograd.grad(got[0].sin().sum(), list(changed.parameters()), allow_unused=True)
    named = dict(zip((name for name, _ in changed.named_parameters()), found, strict=True))
    for name, their in zip(weights, grads, strict=True):
        own = named[name]
        torch.testing.assert_close(torch.zeros(()) if own is None else own, torch.zeros(()) if their is None else their)
    assert changed(*inputs, need_weights=False, **MASKS[mask])[1] is None


def test_a_single_text_and_shared_modules():
    model = One(batch_first=True)
    model.again = model.inner
    holder = nn.ModuleDict({"a": model, "b": model})
    x = torch.randn(L, D, dtype=torch.float64)
    expected = model(x, x, x)
    assert len(sc.replace_attention(holder)) == 1
    assert model.again is model.inner
    for got, their in zip(holder["b"](x, x, x), expected, strict=True):
        torch.testing.assert_close(got, their)


def test_hooks_go_on_to_be_called_and_can_be_removed():
    model, heard = One(batch_first=True), []
    handles = [
        model.inner.register_forward_pre_hook(lambda *_: heard.append("before"), with_kwargs=True),
        model.inner.register_forward_hook(lambda *_: heard.append("after"), with_kwargs=True),
        model.inner.register_full_backward_hook(lambda *_: heard.append("backward")),
    ]
    sc.replace_attention(model)
    x = torch.randn(B, L, D, dtype=torch.float64, requires_grad=True)
    model(x, x, x, need_weights=False)[0].sum().backward()
    assert heard == ["before", "after", "backward"]
    for handle in handles:
        handle.remove()
    model(x, x, x)[0].sum().backward()
    assert len(heard) == 3


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_a_whole_transformer_loses_as_before(batch_first, training):
    torch.manual_seed(0)
    model = nn.Transformer(D, H, 2, 2, 32, dropout=0.0, batch_first=batch_first).double().train(training)
    source, target = torch.randn(B, S, D).double(), torch.randn(B, L, D).double()
    causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    facts = {
        "tgt_mask": causal,
        "tgt_is_causal": True,
        "src_key_padding_mask": PADDED,
        "memory_key_padding_mask": PADDED,
    }
    inputs = (source, target) if batch_first else (source.transpose(0, 1), target.transpose(0, 1))
    changed = copy.deepcopy(model)
    replaced = sc.replace_attention(changed)
    assert len(replaced) == 6
    assert replaced[0].name == "encoder.layers.0.self_attn"
    out, expected = changed(*inputs, **facts), model(*inputs, **facts)
    torch.testing.assert_close(out, expected)
    out.square().mean().backward()
    expected.square().mean().backward()
    for (name, own), (_, their) in zip(changed.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(own.grad, their.grad, msg=lambda text, name=name: f"{name}: {text}")
    with torch.no_grad():
        torch.testing.assert_close(changed(*inputs, **facts), out)


def test_a_pattern_holds_for_self_attention_only():
    model = nn.Transformer(D, H, 1, 1, 32, dropout=0.0, batch_first=True).double()
    changed = copy.deepcopy(model)
    sc.replace_attention(changed, mask=masks.Window(2, 0))
    source, target = torch.randn(B, S, D).double(), torch.randn(B, L, D).double()
    hidden = {n: ~masks.Window(2, 0).to_dense(n)[0, 0] for n in (S, L)}
    expected = model(source, target, src_mask=hidden[S], tgt_mask=hidden[L])
    torch.testing.assert_close(changed(source, target), expected)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_a_pattern_beside_keys_that_the_layer_adds(options):
    model = One(batch_first=True, **options)
    changed = copy.deepcopy(model)
    pattern = masks.Causal() & masks.Window(3, 0)
    sc.replace_attention(changed, mask=pattern)
    x = torch.randn(B, L, D, dtype=torch.float64)
    expected = model(x, x, x, attn_mask=~pattern.to_dense(L)[0, 0], key_padding_mask=PADDED[:, :L])
    got = changed(x, x, x, key_padding_mask=PADDED[:, :L])
    torch.testing.assert_close(got[0], expected[0])


@pytest.mark.parametrize("norms", [True, False])
def test_attentions_of_vision_transformers(norms):
    model = nn.Sequential(TimmForm(norms=norms), nn.ReLU(), TimmForm(norms=norms)).double()
    changed = copy.deepcopy(model)
    before = torch.random.get_rng_state()
    assert [one.before for one in sc.replace_attention(changed)] == ["TimmForm", "TimmForm"]
    assert torch.equal(before, torch.random.get_rng_state())
    x = torch.randn(B, L, D, dtype=torch.float64)
    torch.testing.assert_close(changed(x), model(x))
    mask = torch.rand(L, L) < 0.7
    mask.fill_diagonal_(True)
    torch.testing.assert_close(changed[0](x, mask), model[0](x, mask))
    torch.testing.assert_close(changed[0](x, mask.double()), model[0](x, mask.double()))
    for is_causal in (True, False):
        torch.testing.assert_close(changed[0](x, None, is_causal), model[0](x, is_causal=is_causal))
        torch.testing.assert_close(changed[0](x, attn_mask=None, is_causal=is_causal), model[0](x, None, is_causal))
    windowed = copy.deepcopy(model)
    sc.replace_attention(windowed, mask=masks.Window(1, 1))
    expected = model[0](x, masks.Window(1, 1).to_dense(L)[0, 0])
    torch.testing.assert_close(windowed[0](x), expected)
    assert changed.state_dict().keys() == model.state_dict().keys()


def test_models_of_transformers():
    model = gpt2()
    tokens = torch.randint(50, (2, 12))
    expected = model(tokens, labels=tokens).loss
    expected.backward()
    grads = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    replaced = sc.replace_attention(model)
    assert [one.name for one in replaced] == ["transformer.h.0.attn", "transformer.h.1.attn"]
    loss = model(tokens, labels=tokens).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    for own, their in zip((weight.grad for weight in model.parameters()), grads, strict=True):
        torch.testing.assert_close(own, their, atol=1e-6, rtol=1e-3)


def test_a_pattern_for_a_model_of_transformers_inside_another_module():
    config = MistralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=None,
    )
    plain = MistralForCausalLM(config).eval()
    windowed = copy.deepcopy(plain)
    windowed.config.sliding_window = windowed.model.config.sliding_window = 4
    holder = nn.ModuleDict({"text": plain})
    tokens = torch.randint(50, (1, 12))
    expected = windowed(tokens).logits
    assert sc.replace_attention(holder, mask=masks.Window(3, 0))[0].name.startswith("text.model.")
    torch.testing.assert_close(plain(tokens).logits, expected)


def test_an_encoder_of_transformers_with_padding():
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    model = BertModel(config).eval()
    tokens, padding = torch.randint(50, (2, 9)), torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    expected = model(tokens, attention_mask=padding).last_hidden_state
    sc.replace_attention(model)
    got = model(tokens, attention_mask=padding).last_hidden_state
    torch.testing.assert_close(got[padding.bool()], expected[padding.bool()])


def bert():
    config = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertModel(BertConfig(**config, intermediate_size=32))


def t5():
    return T5Model(T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2))


ATTENTIONS = {
    bert: ["encoder.layer.0.attention.self"],
    t5: [
        "encoder.block.0.layer.0.SelfAttention",
        "decoder.block.0.layer.0.SelfAttention",
        "decoder.block.0.layer.1.EncDecAttention",
    ],
    gpt2: ["transformer.h.0.attn", "transformer.h.1.attn"],
}


@pytest.mark.parametrize("build", ATTENTIONS)
def test_each_attention_of_a_model_of_transformers_is_listed_once(build):
    assert [one.name for one in sc.replace_attention(build())] == ATTENTIONS[build]


def test_another_mechanism_is_a_copy_for_each_and_trains():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 32, batch_first=True), 2)
    replaced = sc.replace_attention(model, mechanism=mechanisms.Linear())
    assert "Linear" in replaced[0].after
    model(torch.randn(B, L, D)).sum().backward()
    sinks = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 32, batch_first=True), 2)
    sc.replace_attention(sinks, mechanism=mechanisms.Softmax(sink_logit=H))
    logits = [layer.self_attn.mechanism.sink_logit for layer in sinks.layers]
    assert logits[0] is not logits[1]


def test_it_is_recorded():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 32, dropout=0.0, batch_first=True), 1)
    x = torch.randn(B, L, D)
    with sc.record(model, keep="qk") as before:
        model(x)
    sc.replace_attention(model)
    with sc.record(model, keep="qk") as after:
        model(x)
    torch.testing.assert_close(after[0].matrix.to_dense(), before[0].matrix.to_dense())
