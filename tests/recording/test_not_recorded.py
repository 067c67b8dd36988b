"""Tests of the warning about attention beside the recorded layers that computes its weights by itself."""

import warnings

import pytest
import torch
from tests.integrations import model_zoo as zoo
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LongT5Config, LongT5Model, SamVisionConfig
from transformers.models.sam.modeling_sam import SamVisionEncoder

import saccade as sc
from saccade.recording import UnrecordedLayersWarning, record


class PlainAttention(nn.Module):
    """Attention in plain operations, which multiplies only a part of its weights."""

    def forward(self, x):
        return (x @ x.mT).softmax(-1)[..., :3] @ x[..., :3, :]


class AttentionOutput(nn.Module):
    """A part of such a layer that does not attend."""

    def forward(self, x):
        return x.relu()


class AttentionBlock(nn.Module):
    """A module around the one that attends."""

    def __init__(self, attention):
        super().__init__()
        self.inner, self.out = attention, AttentionOutput()

    def forward(self, x):
        return self.out(self.inner(x))


class Fused(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


X = torch.randn(2, 4, 7, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["local", "transient-global"])
def test_layers_of_longt5_are_recorded_in_blocks(kind):
    config = LongT5Config(
        vocab_size=zoo.WORDS, d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=40, local_radius=4, pad_token_id=0,
        encoder_attention_type=kind, decoder_start_token_id=1,
    )  # fmt: skip
    network, ids = LongT5Model(config).eval(), zoo.batch("llama")["input_ids"]
    with torch.no_grad():
        out = network(input_ids=ids, decoder_input_ids=ids, output_attentions=True)
        with record(network, keep="qk") as recording:
            again = network(input_ids=ids, decoder_input_ids=ids)
    assert torch.equal(again.last_hidden_state, out.last_hidden_state)
    assert len(recording) == 6
    assert recording.not_recorded == ()
    blocks = [run.matrix.to_dense() for name, run in recording.items() if name.startswith("encoder")]
    for ours, theirs in zip(blocks, out.encoder_attentions, strict=True):
        torch.testing.assert_close(ours, theirs.flatten(0, 1))


def test_the_innermost_is_named_once_however_often_it_runs():
    model = nn.Sequential(Fused(), AttentionBlock(PlainAttention()), AttentionBlock(Fused()))
    said = pytest.warns(UnrecordedLayersWarning, match=r"1\.inner \(PlainAttention\) ran")
    with said as caught, record(model) as heard:
        model(X)
        model(X)
    assert heard.not_recorded == ("1.inner",)
    assert heard.layers == ("0", "2.inner")
    assert len(caught) == 1


def test_many_are_counted():
    model = nn.Sequential(Fused(), *(PlainAttention() for _ in range(11)))
    with (
        pytest.warns(UnrecordedLayersWarning, match=r"8 \(PlainAttention\) and 3 more ran"),
        record(model) as recording,
    ):
        model(X)
    assert len(recording.not_recorded) == 11


def test_only_what_ran_is_named():
    model = nn.ModuleList([Fused(), PlainAttention()])
    with record(model) as recording:
        model[0](X)
    assert recording.not_recorded == ()


def test_a_layer_that_is_computed_again_for_its_gradient():
    model, x = AttentionBlock(Fused()), X.clone().requires_grad_()
    with record(model) as recording:
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert recording.not_recorded == ()
    assert len(recording["inner"].calls) == 1


@pytest.mark.parametrize("layers, is_said", [(None, True), ("1", True), (0, True), ("0", False), (["0", "2*"], False)])
def test_layers_that_were_not_selected_are_not_reported(layers, is_said):
    model = nn.Sequential(Fused(), PlainAttention(), Fused())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        refused = pytest.raises(sc.UnsupportedError, match="1 was not recorded; 0, 2 were")
        if layers == "1":
            with refused, record(model, layers=layers) as recording:
                model(X)
        else:
            with record(model, layers=layers) as recording:
                model(X)
    assert [one.category for one in caught] == [UnrecordedLayersWarning] * (is_said and layers != "1")
    assert recording.not_recorded == ("1",)


def test_a_model_without_recorded_attention_reports_what_ran():
    model = AttentionBlock(PlainAttention())
    with (
        pytest.raises(sc.UnsupportedError, match=r"- inner \(PlainAttention\) ran but could(.|\n)*Hint"),
        record(model),
    ):
        model(X)
    with (
        pytest.raises(sc.UnsupportedError, match="no attention layer was recorded: none ran"),
        record(model),
    ):
        model.out(X)


def test_a_layer_that_leaves_the_attention_interface():
    network, ids = zoo.model("gpt2", reorder_and_upcast_attn=True), zoo.batch("gpt2")["input_ids"]
    eager = zoo.model("gpt2", attn_implementation="eager", reorder_and_upcast_attn=True)
    eager.load_state_dict(network.state_dict())
    with torch.no_grad(), record(network, keep="qk") as recording:
        network(ids)
    with torch.no_grad():
        theirs = eager(ids, output_attentions=True).attentions
    for ours, expected in zip(recording.values(), theirs, strict=True):
        torch.testing.assert_close(ours.matrix.to_dense(), expected)


def test_a_layer_that_asks_for_the_product_beside_the_attention_interface():
    config = SamVisionConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, mlp_dim=40, output_channels=8, image_size=32,
        patch_size=8, window_size=2, global_attn_indexes=[1],
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    network, x = SamVisionEncoder(config).eval(), torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        expected = network(x).last_hidden_state
        with record(network, keep="qk") as recording:
            assert torch.equal(network(x).last_hidden_state, expected)
    assert recording.layers == ("layers.0.attn", "layers.1.attn")
    assert recording.not_recorded == ()
    assert recording[1].shape == (1, 4, 16, 16)


class TurnedAttention(nn.MultiheadAttention):
    """A user's attention in torch's layer."""

    def forward(self, query, key, value, **options):
        return super().forward(query.flip(1), key, value, **options)


def test_a_forward_of_ones_own_in_torch_s_layer_is_recorded_as_it_calls_torch_s_function():
    layer, x = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), torch.randn(2, 7, 16)
    layer.self_attn = TurnedAttention(16, 4, batch_first=True)
    model = nn.ModuleList([Fused(), layer])
    with torch.no_grad(), record(model, keep="qk") as recording:
        model[0](X)
        layer(x)
    assert recording.layers == ("0", "1.self_attn")
    turned = nn.MultiheadAttention.forward(layer.self_attn, x.flip(1), x, x, average_attn_weights=False)[1]
    torch.testing.assert_close(recording["1.self_attn"].matrix.to_dense(), turned)


class Mapped(nn.Module):
    def forward(self, x):
        return torch.vmap(lambda x: (x @ x.mT).softmax(-1) @ x)(x)


@pytest.mark.parametrize("keep", ["statistics", "qk"])
def test_attention_within_vmap_is_noted(keep):
    model = nn.Sequential(Fused(), Mapped())
    expected = model(X)
    with pytest.warns(UnrecordedLayersWarning), record(model, keep=keep) as recording:
        assert torch.equal(model(X), expected)
    assert (recording.layers, recording.not_recorded) == (("0",), ("1",))
