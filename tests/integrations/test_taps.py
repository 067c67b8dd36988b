"""What a tap hands out is the matrix that the layer multiplied by; and the layer says the same to the bit."""

import math

import pytest
import torch
from tests.integrations import model_zoo as zoo
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

import saccade as sc
from saccade import caches, masks
from saccade.integrations.taps import tapped


def heard(model, *args, grad=False, **kwargs):
    """Output, and what was handed out, densely."""
    found = []
    with torch.set_grad_enabled(grad):
        expected = model(*args, **kwargs)
        with tapped(model, lambda name, make: found.append((name, make().to_dense()))):
            out = model(*args, **kwargs)
    assert_equal(out, expected)
    return out, found


def assert_equal(out, expected):
    if isinstance(out, tuple):
        for own, other in zip(out, expected, strict=True):
            assert_equal(own, other)
    elif out is not None:
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)


# transformers


@pytest.mark.parametrize("name", zoo.ALL)
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "saccade"])
def test_models_of_transformers(name, implementation):
    sc.integrations.transformers.install()
    if implementation == "sdpa" and name in ("gemma2", "gpt_oss"):
        implementation = "eager"  # all that transformers has for them
    inputs, eager = zoo.batch(name), zoo.model(name)
    with torch.no_grad():
        result = eager(**inputs, output_attentions=True)
    if name in zoo.PAIRED:
        both = zip(result.decoder_attentions, result.cross_attentions, strict=True)
        expected = [*result.encoder_attentions, *(weights for pair in both for weights in pair)]
    else:
        expected = result.attentions
    network = zoo.model(name, implementation)
    found = []
    with torch.no_grad():
        plain = zoo.output(name, network(**inputs))
        with tapped(network, lambda name, make: found.append((name, make()))):
            out = zoo.output(name, network(**inputs))
    assert torch.equal(out, plain)
    assert len(found) == len(expected)
    for (_, matrix), weights in zip(found, expected, strict=True):
        real = weights.shape[2] - (8 if name in zoo.CAUSAL else weights.shape[2])
        dense = matrix.to_dense()
        close(dense[0, :, real:], weights[0, :, real:])
        close(dense[1], weights[1])
    assert "Dense" not in str([matrix.mask for _, matrix in found])
    names = [name for name, _ in found]
    assert len(set(names)) == len(names)
    assert all(isinstance(network.get_submodule(name), nn.Module) for name in names)


def test_a_mask_of_the_same_size_is_not_taken_for_another():
    network, inputs, found = zoo.model("llama", "sdpa"), zoo.batch("llama"), []
    own = (torch.rand(2, 1, 11, 11) < 0.5) | torch.eye(11, dtype=torch.bool)
    with torch.no_grad(), tapped(network, lambda name, make: found.append(make().to_dense())):
        network(**inputs)
        network(inputs["input_ids"], attention_mask=own)
        copied = own.clone()
        network(inputs["input_ids"], attention_mask=copied)
    assert torch.equal(found[2] > 0, own.expand(2, 4, 11, 11))
    assert torch.equal(found[4], found[2])


@pytest.mark.parametrize("small", [1 << 20, 30])  # few rows at a time
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("implementation", ["eager", "sdpa", "saccade"])
def test_a_mask_that_is_written_into_says_what_was_written(implementation, guard, small, monkeypatch):
    monkeypatch.setattr("saccade.integrations.transformers_tap._SMALL", small)
    sc.integrations.transformers.install()
    network, inputs, found = zoo.model("llama", implementation), zoo.batch("llama"), []
    embeddings = torch.zeros(2, 11, 32)
    with guard(), tapped(network, lambda name, make: found.append(make())):
        mask = masking_utils.create_causal_mask(network.config, embeddings, inputs["attention_mask"], None)
        network(inputs["input_ids"], attention_mask=mask)
        mask[..., 5] = mask[0, 0, 0, 10]  # what hides a key, in whichever way
        network(inputs["input_ids"], attention_mask=mask)
        before, after = found[0].to_dense(), found[2].to_dense()
    assert "Dense" not in str(found[0].mask)
    assert (before[1, :, 5:, 5] > 0).all()
    assert (after[..., 5] == 0).all()
    assert ((after > 0) == (before > 0))[..., [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]].all()


def test_the_ear_is_taken_out_again():
    before = (AttentionInterface.get_interface, AttentionMaskInterface.__getitem__)
    network, other, names = zoo.model("llama"), zoo.model("llama"), []
    with tapped(network, lambda name, make: names.append(name)):
        with tapped(network, lambda name, make: names.append(f"inner {name}")):
            network(**zoo.batch("llama"))
        other(**zoo.batch("llama"))
        assert AttentionInterface.get_interface is not before[0]
    assert names[:2] == ["model.layers.0.self_attn", "inner model.layers.0.self_attn"]
    assert len(names) == 4
    network(**zoo.batch("llama"))
    assert len(names) == 4
    assert (AttentionInterface.get_interface, AttentionMaskInterface.__getitem__) == before
    assert "forward" not in vars(network)


class Around(nn.Module):
    """A model of a user's own, around one of transformers."""

    def __init__(self):
        super().__init__()
        self.inner = zoo.model("llama", "sdpa")

    def forward(self, **inputs):
        return self.inner(**inputs).logits


def test_the_product_inside_an_attention_function_is_no_layer_of_its_own():
    _, found = heard(Around(), **zoo.batch("llama"))
    assert [name for name, _ in found] == ["inner.model.layers.0.self_attn", "inner.model.layers.1.self_attn"]


def test_a_checkpointed_layer_is_handed_out_once():
    network = zoo.model("llama").train()
    network.gradient_checkpointing_enable()
    ids, names = zoo.batch("llama")["input_ids"], []
    with tapped(network, lambda name, make: names.append(name)):
        network(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert len(names) == 2


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(autocast):
    network = zoo.model("gpt_oss") if autocast else zoo.model("gpt_oss").bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        _, found = heard(network, **zoo.batch("gpt_oss"), use_cache=False, return_dict=False)
    assert all(weights.dtype == torch.float32 for _, weights in found)


def test_gradients_stay_as_they_are():
    ids, grads = zoo.batch("llama")["input_ids"], []
    for recorded in (False, True):
        network = zoo.model("llama", "sdpa")
        with tapped(network, lambda name, make: make().entropy() if recorded else None):  # noqa: B023
            network(input_ids=ids, labels=ids).loss.backward()
        grads.append([parameter.grad for parameter in network.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


# torch.nn


def additive(hidden):
    return torch.zeros(hidden.shape).masked_fill(hidden, -math.inf)


CAUSAL = ~masks.Causal().to_dense(7)[0, 0]
PADDING = torch.arange(7) >= torch.tensor([[5], [7], [3]])


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"kdim": 12, "vdim": 10}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"dropout": 0.0}],
    ids=str,
)
@pytest.mark.parametrize(
    "masking",
    [
        {},
        {"attn_mask": CAUSAL},
        {"attn_mask": additive(CAUSAL)},
        {"attn_mask": torch.randn(7, 7)},
        {"attn_mask": CAUSAL.expand(12, 7, 7), "key_padding_mask": PADDING},
        {"key_padding_mask": additive(PADDING)},
        {"key_padding_mask": PADDING},
    ],
    ids=["none", "causal", "additive", "terms", "both", "additive-padding", "padding"],
)
def test_multihead_attention(need_weights, batch_first, training, options, masking):
    layer = nn.MultiheadAttention(16, 4, batch_first=batch_first, **options).train(training)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.3)
    x, key, value = (torch.randn(3, 7, width) for width in (16, layer.kdim, layer.vdim))
    if not batch_first:
        x, key, value = (tensor.transpose(0, 1) for tensor in (x, key, value))
    inputs = (x, x, x) if layer._qkv_same_embed_dim else (x, key, value)
    _, found = heard(layer, *inputs, need_weights=need_weights, **masking)
    expected = layer(*inputs, **masking, average_attn_weights=False)[1]
    ((name, weights),) = found
    assert name == "MultiheadAttention"
    close(weights, expected)


def test_multihead_attention_without_a_batch():
    layer, x = nn.MultiheadAttention(16, 4).eval(), torch.randn(7, 16)
    _, ((_, weights),) = heard(layer, x, x, x)
    close(weights[0], layer(x, x, x, average_attn_weights=False)[1])


@pytest.fixture
def fast_path(monkeypatch):
    """How often torch took its fast path."""
    taken = []
    original = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a: taken.append(1) or original(*a))
    return taken


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masking", ["none", "causal", "padding"])
def test_encoder(norm_first, training, masking, fast_path):
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    x = torch.randn(3, 7, 16)
    options = {
        "none": {},
        "causal": {"mask": CAUSAL, "is_causal": True},
        "padding": {"src_key_padding_mask": PADDING},
    }[masking]
    _, found = heard(encoder, x, **options)
    assert len(fast_path) == (0 if training else 4)
    assert [name for name, _ in found] == ["layers.0.self_attn", "layers.1.self_attn"]
    first = encoder.layers[0]
    normed = first.norm1(x) if norm_first else x
    masked = {"attn_mask": options.get("mask"), "key_padding_mask": options.get("src_key_padding_mask")}
    close(found[0][1], first.self_attn(normed, normed, normed, average_attn_weights=False, **masked)[1])


def test_fast_path_after_another(fast_path):
    layer, x, names = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), torch.randn(3, 7, 16), []
    with torch.no_grad(), tapped(layer, lambda name, make: names.append(tuple(make().shape))):
        layer.train()(x)
        layer.eval()(x[:, :5])
        layer.train()(x[:, :3])
    assert names == [(3, 4, 7, 7), (3, 4, 5, 5), (3, 4, 3, 3)]
    assert len(fast_path) == 1


@pytest.mark.parametrize("norm_first", [False])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_encoder_with_nested_tensors(norm_first, fast_path):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(3, 7, 16)
    _, found = heard(encoder, x, src_key_padding_mask=PADDING)
    assert len(fast_path) == 4
    first = encoder.layers[0].self_attn
    expected = first(x, x, x, key_padding_mask=PADDING, average_attn_weights=False)[1]
    close(found[0][1], expected.masked_fill(PADDING[:, None, :, None], 0.0))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors_inside_a_model(fast_path, monkeypatch):
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 1)

        def forward(self, x):
            return self.encoder(x, src_key_padding_mask=PADDING).mean(1)

    nested = []
    original = torch._nested_tensor_from_mask
    monkeypatch.setattr(torch, "_nested_tensor_from_mask", lambda *a, **k: nested.append(1) or original(*a, **k))
    _, found = heard(Classifier().eval(), torch.randn(3, 7, 16))
    assert [name for name, _ in found] == ["encoder.layers.0.self_attn"]
    assert len(nested) == len(fast_path) == 2


def test_dropout_draws_what_it_would_have_drawn():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, dropout=0.5, batch_first=True), 2).train()
    x, outputs, found = torch.randn(3, 7, 16), [], []
    for recorded in (False, True):
        torch.manual_seed(1)
        with tapped(encoder, lambda name, make: found.append(make().to_dense()) if recorded else None):  # noqa: B023
            outputs.append(encoder(x))
    assert torch.equal(*outputs)
    assert all(torch.allclose(weights.sum(-1), torch.ones(())) for weights in found)


def test_an_encoder_and_a_decoder(fast_path):
    network = nn.Transformer(16, 4, 1, 1, 32, batch_first=True).eval()
    source, target = torch.randn(3, 7, 16), torch.randn(3, 5, 16)
    _, found = heard(network, source, target, tgt_mask=~masks.Causal().to_dense(5)[0, 0])
    assert [(name, tuple(weights.shape)) for name, weights in found] == [
        ("encoder.layers.0.self_attn", (3, 4, 7, 7)),
        ("decoder.layers.0.self_attn", (3, 4, 5, 5)),
        ("decoder.layers.0.multihead_attn", (3, 4, 5, 7)),
    ]
    assert len(fast_path) == 2


# fused products


class Fused(nn.Module):
    """An attention layer as timm writes them."""

    def __init__(self, **options):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.options = options

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).movedim(-3, 0).transpose(-3, -2)
        return F.scaled_dot_product_attention(q, k, v, **self.options).transpose(-3, -2).flatten(-2)


class Mixed(nn.Module):
    """A layer of the user's own beside torch's."""

    def __init__(self):
        super().__init__()
        self.fused = Fused()
        self.encoder = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)

    def forward(self, x):
        x = self.encoder(self.fused(x))
        return F.scaled_dot_product_attention(x, x, F.scaled_dot_product_attention(x, x, x))


def weights_of(q, k, *, attn_mask=None, is_causal=False, scale=None):
    """The definition, with torch's alignment of its causal flag."""
    scores = q.double() @ k.double().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(-1).nan_to_num(0.0).float()


@pytest.mark.parametrize("leading", [(3,), (), (2, 3)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": ~CAUSAL},
        {"attn_mask": torch.randn(7, 7)},
        {"attn_mask": torch.randn(4, 1, 7)},
    ],
    ids=["none", "causal", "scale", "mask", "terms", "terms-per-head"],
)
def test_fused_products(leading, options):
    layer, x = Fused(**options).eval(), torch.randn(*leading, 7, 16)
    _, ((name, weights),) = heard(layer, x)
    assert name == "Fused"
    q, k, _ = layer.qkv(x).unflatten(-1, (3, 4, 4)).movedim(-3, 0).transpose(-3, -2)
    close(weights, weights_of(q, k, **options).reshape(-1, 4, 7, 7))


def test_a_mask_for_each_item():
    mask = torch.rand(2, 3, 4, 7, 7) < 0.5
    layer, x = Fused(attn_mask=mask), torch.randn(2, 3, 7, 16)
    _, ((_, weights),) = heard(layer, x)
    q, k, _ = layer.qkv(x).unflatten(-1, (3, 4, 4)).movedim(-3, 0).transpose(-3, -2)
    close(weights, weights_of(q, k, attn_mask=mask).reshape(-1, 4, 7, 7))


def test_a_causal_product_of_fewer_queries_starts_at_the_first_key():
    class Last(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
    _, ((_, weights),) = heard(Last(), q, k)
    close(weights, weights_of(q, k, is_causal=True))


def test_grouped_heads():
    class Grouped(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    q, k = torch.randn(2, 6, 3, 8), torch.randn(2, 2, 5, 8)
    _, ((_, weights),) = heard(Grouped(), q, k)
    close(weights, weights_of(q, k.repeat_interleave(3, 1)))


def test_layers_of_both_kinds_in_one_model(fast_path):
    model, x = Mixed().eval(), torch.randn(3, 7, 16)
    _, found = heard(model, x)
    assert [name for name, _ in found] == ["fused", "encoder.self_attn", "Mixed", "Mixed:1"]
    assert len(fast_path) == 2
    assert found[2][1].shape == (1, 3, 7, 7)


def test_two_listen_to_one_model(fast_path):
    model, x, names = Mixed().eval(), torch.randn(3, 7, 16), {"outer": [], "inner": []}
    with torch.no_grad():
        expected = model(x)
        with (
            tapped(model, lambda name, make: names["outer"].append(name)),
            tapped(model, lambda name, make: names["inner"].append(name)),
        ):
            assert torch.equal(model(x), expected)
    assert names["outer"] == names["inner"] == ["fused", "encoder.self_attn", "Mixed", "Mixed:1"]
    assert len(fast_path) == 2
    assert torch.overrides._get_current_function_mode_stack() == []


def test_nothing_is_left_behind_by_an_error():
    model = Mixed().eval()
    with tapped(model, lambda name, make: make()), pytest.raises(RuntimeError, match="shape"):
        model(torch.randn(3, 7, 15))
    assert torch.overrides._get_current_function_mode_stack() == []
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("ran_before", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        Fused,
        lambda: sc.nn.MultiHeadAttention(16, 4),
        lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval(),
    ],
    ids=["product", "ours", "torch"],
)
def test_a_compiled_layer_is_refused_among_others_that_are_not(make, ran_before):
    torch._dynamo.reset()
    layer, x = make(), torch.randn(1, 7, 16)
    model = nn.Sequential(Fused(), torch.compile(layer, backend="eager"))
    with torch.no_grad():
        expected = model[0](x) if not ran_before else model(x)
        with tapped(model, lambda name, make: make()), pytest.raises(sc.UnsupportedError, match="runs no Python"):
            model(x)
        assert torch.equal((model if ran_before else model[0])(x), expected)
    torch._dynamo.reset()


def test_what_is_compiled_and_attends_to_nothing_is_no_reason_to_refuse():
    torch._dynamo.reset()
    model, names = nn.Sequential(Fused(), torch.compile(nn.Sequential(nn.Linear(16, 16)), backend="eager")), []
    with torch.no_grad(), tapped(model, lambda name, make: names.append(name)):
        model(torch.randn(1, 7, 16))
    assert names == ["0"]
    torch._dynamo.reset()


# our own


def test_our_own_layers():
    shared = sc.mechanisms.Softmax()
    block = nn.Sequential(*(sc.nn.MultiHeadAttention(16, 4, mask=masks.Causal(), mechanism=shared) for _ in range(2)))
    x = torch.randn(2, 7, 16)
    _, found = heard(block, x)
    assert [name for name, _ in found] == ["0", "1"]
    close(found[0][1], block[0].matrix(x).to_dense())
    close(found[1][1], block[1].matrix(block[0](x)).to_dense())


def test_a_cache_that_holds_a_sum_is_refused():
    layer = sc.nn.MultiHeadAttention(16, 4, mechanism=sc.mechanisms.Linear(), mask=masks.Causal())
    cache, x = caches.RecurrentCache(), torch.randn(1, 7, 16)
    with tapped(layer, lambda name, make: make()):
        layer(x, cache=cache)
        with pytest.raises(sc.UnsupportedError, match=r"MultiHeadAttention cannot run(.|\n)*holds a sum"):
            layer(x, cache=cache)
    layer(x, cache=cache)


@pytest.mark.parametrize(
    "cache", [caches.SinkWindowCache(1, 3), caches.BlockSelectCache(2, 6), caches.HeavyHitterCache(8)]
)
def test_a_cache_that_hands_on_some_keys_is_refused(cache):
    layer = sc.nn.MultiHeadAttention(16, 4, mask=masks.Causal())
    x = torch.randn(1, 9, 16)
    refused = pytest.raises(sc.UnsupportedError, match=r"MultiHeadAttention cannot run(.|\n)*some of the keys")
    with tapped(layer, lambda name, make: make()), refused:
        layer(x, cache=cache)
    layer(x, cache=cache)


# kernels that are not here: what they are told


def definition_of_flash(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **facts):
    """Flash attention by what its documentation says: aligned at the end, keys of padding left out."""
    del facts
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    q_len, kv_len = query.shape[2], key.shape[2]
    q, kv = torch.arange(kv_len - q_len, kv_len)[:, None], torch.arange(kv_len)
    allowed = (kv <= q) if module.is_causal else torch.ones(q_len, kv_len, dtype=torch.bool)
    if sliding_window is not None:
        allowed = allowed & (kv > q - sliding_window)
    allowed = allowed if attention_mask is None else allowed & attention_mask[:, None, None, :].bool()
    scores = (query @ key.mT * scaling).masked_fill(~allowed, -math.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ value).transpose(1, 2), None


@pytest.mark.parametrize("padded", [0, 3])
@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
def test_flash_attention(name, padded, monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", definition_of_flash)
    inputs = zoo.batch(name, padded=padded)
    with torch.no_grad():
        expected = zoo.model(name)(**inputs, output_attentions=True).attentions
        network, found = zoo.model(name), []
        network.config._attn_implementation_internal = "flash_attention_2"
        with tapped(network, lambda name, make: found.append(make())):
            network(**inputs)
    for matrix, weights in zip(found, expected, strict=True):
        close(matrix.to_dense()[0, :, padded:], weights[0, :, padded:])
        close(matrix.to_dense()[1], weights[1])


def test_packed_documents_under_flash_attention_are_refused(monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", definition_of_flash)
    network = zoo.model("llama")
    network.config._attn_implementation_internal = "flash_attention_2"
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]])
    with (
        tapped(network, lambda name, make: make()),
        pytest.raises(sc.UnsupportedError, match=r'packed documents(.|\n)*set_attn_implementation\("sdpa"\)'),
    ):
        network(input_ids=zoo.batch("llama")["input_ids"][:1], position_ids=places, use_cache=False)


@pytest.mark.parametrize("known", [True, False])
def test_block_masks(known, monkeypatch):
    def product(module, query, key, value, attention_mask, scaling=None, **facts):
        assert isinstance(attention_mask, BlockMask)
        del facts
        return torch.zeros_like(query).transpose(1, 2), None

    def compiled_nothing(*, mask_mod, B, H, Q_LEN, KV_LEN, device, _compile):
        del _compile
        return create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device=device)

    monkeypatch.setitem(AttentionInterface._global_mapping, "flex_attention", product)
    monkeypatch.setattr(masking_utils, "create_block_mask", compiled_nothing)
    network, inputs, found = zoo.model("mistral"), zoo.batch("mistral"), []
    network.config._attn_implementation_internal = "flex_attention"
    if not known:
        monkeypatch.setattr("saccade.integrations.transformers_tap._tapped_mask", lambda function: function)
    with torch.no_grad(), tapped(network, lambda name, make: found.append(make())):
        network(**inputs)
    assert ("Predicate" in str(found[0].mask)) != known
    dense = masks.sliding_window(4).to_dense(11) & inputs["attention_mask"][:, None, None, :].bool()
    assert torch.equal(found[0].to_dense() > 0, dense.expand(2, 4, 11, 11))
