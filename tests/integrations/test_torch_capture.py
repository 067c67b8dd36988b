"""A matrix captured from torch.nn is the one that the layer multiplied by, and its output is bitwise unchanged."""

import math

import pytest
import torch
from tests.integrations.captured_call import close, heard
from torch import nn

from saccade import masks
from saccade.integrations.capture_all import capture_all
from saccade.support.errors import UnsupportedError


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
    with torch.no_grad(), capture_all(layer, lambda name, make: names.append(tuple(make().shape))):
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
        with capture_all(encoder, lambda name, make: found.append(make().to_dense()) if recorded else None):  # noqa: B023
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


class Called(nn.Module):
    """A module that calls the function behind torch's layer, with the weights of one."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, key, value, **masking):
        layer, separate = self.layer, {}
        if not layer._qkv_same_embed_dim:
            separate = {f"{name}_proj_weight": getattr(layer, f"{name}_proj_weight") for name in "qkv"}
        return nn.functional.multi_head_attention_forward(
            x, key, value, 16, 4, layer.in_proj_weight, layer.in_proj_bias, layer.bias_k, layer.bias_v,
            layer.add_zero_attn, 0.0, layer.out_proj.weight, layer.out_proj.bias, training=False,
            use_separate_proj_weight=bool(separate), average_attn_weights=False, **separate, **masking,
        )  # fmt: skip


@pytest.mark.parametrize(
    "options", [{}, {"kdim": 12, "vdim": 10}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str
)
@pytest.mark.parametrize("masking", [{}, {"attn_mask": CAUSAL}, {"key_padding_mask": PADDING}], ids=str)
def test_the_function_of_torch_s_layer(options, masking):
    layer = nn.MultiheadAttention(16, 4, **options)
    inputs = [torch.randn(7, 3, width) for width in (16, layer.kdim, layer.vdim)]
    model = Called(layer)
    (_, expected), ((name, weights),) = heard(model, *inputs, **masking)
    assert name == "Called"
    close(weights, expected)
    if not masking:
        (_, expected), ((_, weights),) = heard(model, *(x[:, 0] for x in inputs))
        close(weights[0], expected)


def test_keys_that_are_projected_already_are_refused():
    layer, x = nn.MultiheadAttention(16, 4), torch.randn(7, 3, 16)
    model, kept = Called(layer), torch.randn(12, 7, 4)
    refused = pytest.raises(UnsupportedError, match="static_k= contains keys that are already projected")
    with capture_all(model, lambda name, make: make()), refused:
        model(x, x, x, static_k=kept, static_v=kept)
