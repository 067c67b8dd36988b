"""Our multi-head attention with positions against the layers of transformers that use them."""

import pytest
import torch
from transformers import BloomConfig, GptOssConfig, LlamaConfig, Qwen3NextConfig, T5Config
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding
from transformers.models.t5.modeling_t5 import T5Attention

from saccade import masks, nn, positions
from saccade.mechanisms import Softmax


def copied(ours, theirs):
    """Weights of four linear layers, in the order query, key, value, output."""
    layers = (ours.query_projection, ours.key_projection, ours.value_projection, ours.output_projection)
    for layer, weight in zip(layers, theirs, strict=True):
        layer.weight.data.copy_(weight)


def additive(mask, n):
    return torch.zeros(1, 1, n, n).masked_fill(~mask.to_dense(n), torch.finfo(torch.float32).min)


def additive_causal(n):
    return additive(masks.Causal(), n)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_llama(kv_heads):
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=kv_heads, rope_theta=500.0)
    config._attn_implementation = "eager"
    theirs = LlamaAttention(config, 0).eval()
    rotary = positions.Rotary(8, base=500.0)
    ours = nn.MultiHeadAttention(
        32, 4, num_kv_heads=kv_heads, mask=masks.Causal(), rotary=rotary, projection_bias=False
    )
    copied(ours, [layer.weight.data for layer in (theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.o_proj)])
    x = torch.randn(2, 11, 32)
    embeddings = LlamaRotaryEmbedding(config)(x, torch.arange(11)[None])
    expected, weights = theirs(x, position_embeddings=embeddings, attention_mask=additive_causal(11))
    torch.testing.assert_close(ours(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.matrix(x).to_dense(), weights, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_decoder", [False, True])
def test_t5(is_decoder):
    torch.manual_seed(0)
    config = T5Config(d_model=32, d_kv=8, num_heads=4, is_decoder=is_decoder)
    theirs = T5Attention(config, has_relative_attention_bias=True).eval()
    bias = positions.T5(4, bidirectional=not is_decoder)
    bias.load_state_dict({"weight": theirs.relative_attention_bias.weight.data})
    mask = masks.Causal() if is_decoder else None
    ours = nn.MultiHeadAttention(32, 4, mask=mask, mechanism=Softmax(bias=bias, scale=1.0), projection_bias=False)
    copied(ours, [layer.weight.data for layer in (theirs.q, theirs.k, theirs.v, theirs.o)])
    x = torch.randn(2, 150, 32)
    expected = theirs(x, mask=additive_causal(150) if is_decoder else None)[0]
    torch.testing.assert_close(ours(x), expected, atol=1e-5, rtol=1e-5)
    (expected_grad,) = torch.autograd.grad(expected.sin().sum(), theirs.relative_attention_bias.weight)
    (grad,) = torch.autograd.grad(ours(x).sin().sum(), bias.weight)
    torch.testing.assert_close(grad, expected_grad, atol=1e-4, rtol=1e-4)


def test_bloom():
    torch.manual_seed(0)
    config = BloomConfig(hidden_size=32, n_head=4, hidden_dropout=0.0, attention_dropout=0.0)
    theirs = BloomAttention(config, 0).eval()
    ours = nn.MultiHeadAttention(32, 4, mask=masks.Causal(), mechanism=Softmax(bias=positions.ALiBi(4)))
    # Bloom lays query, key and value of one head side by side.
    fused = theirs.query_key_value.weight.data.view(4, 3, 8, 32)
    bias = theirs.query_key_value.bias.data.normal_().view(4, 3, 8)
    copied(ours, [*(fused[:, i].reshape(32, 32) for i in range(3)), theirs.dense.weight.data])
    for i, layer in enumerate((ours.query_projection, ours.key_projection, ours.value_projection)):
        layer.bias.data.copy_(bias[:, i].reshape(32))
    ours.output_projection.bias.data.copy_(theirs.dense.bias.data)
    x = torch.randn(2, 9, 32)
    alibi = build_alibi_tensor(torch.ones(2, 9), 4, torch.float32)
    expected = theirs(x, torch.zeros_like(x), alibi, additive_causal(9))[0]
    torch.testing.assert_close(ours(x), expected, atol=1e-5, rtol=1e-5)


def test_qwen3_next() -> None:
    """Its queries and keys are normed as well, which stands in projections of its own here."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    )
    config._attn_implementation = "eager"
    theirs = Qwen3NextAttention(config, 0).eval()
    rotary = positions.Rotary(8, base=500.0, rotary_dim=4)
    ours = nn.MultiHeadAttention(
        32, 4, num_kv_heads=2, mask=masks.Causal(), rotary=rotary, projection_bias=False, output_gate=True
    )

    class Normed(torch.nn.Module):
        def __init__(self, weight: torch.Tensor, norm: torch.nn.Module):
            super().__init__()
            self.weight, self.norm = weight, norm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm((x @ self.weight.T).unflatten(-1, (-1, 8))).flatten(-2)

    with torch.no_grad():
        for own in theirs.parameters():
            own.copy_(torch.randn_like(own) * 0.3)
        both = theirs.q_proj.weight.view(4, 2, 8, 32)  # queries and gate, head by head
        ours.query_projection = Normed(both[:, 0].reshape(32, 32), theirs.q_norm)
        ours.key_projection = Normed(theirs.k_proj.weight, theirs.k_norm)
        ours.gate_projection.weight.copy_(both[:, 1].reshape(32, 32))
        ours.value_projection.weight.copy_(theirs.v_proj.weight)
        ours.output_projection.weight.copy_(theirs.o_proj.weight)
        x = torch.randn(2, 11, 32)
        angles = Qwen3NextRotaryEmbedding(config)(x, torch.arange(11)[None])
        expected, _ = theirs(x, position_embeddings=angles, attention_mask=additive_causal(11))
        torch.testing.assert_close(ours(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_yarn", [False, True])
@pytest.mark.parametrize("mask", [masks.Causal(), masks.sliding_window(4)], ids=["full", "window"])
def test_gpt_oss(mask: masks.Mask, is_yarn: bool) -> None:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 500.0}
    scaling = None
    if is_yarn:
        rope = {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        }
        scaling = positions.YaRN(8.0, trained_len=64, truncate=False)
    config = GptOssConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rope_parameters=rope
    )
    config._attn_implementation = "eager"
    theirs = GptOssAttention(config, 0).eval()
    with torch.no_grad():
        for own in theirs.parameters():
            own.copy_(torch.randn_like(own) * 0.3)
    softmax = Softmax(sink_logit=theirs.sinks.detach(), scale=theirs.scaling)
    rotary = positions.Rotary(8, base=500.0, scaling=scaling)
    ours = nn.MultiHeadAttention(32, 4, num_kv_heads=2, mask=mask, mechanism=softmax, rotary=rotary).eval()
    pairs = {"query": theirs.q_proj, "key": theirs.k_proj, "value": theirs.v_proj, "output": theirs.o_proj}
    for name, other in pairs.items():
        getattr(ours, f"{name}_projection").load_state_dict(other.state_dict())
    x = torch.randn(2, 11, 32)
    angles = GptOssRotaryEmbedding(config)(x, torch.arange(11)[None])
    expected, weights = theirs(x, position_embeddings=angles, attention_mask=additive(mask, 11))
    torch.testing.assert_close(ours(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.matrix(x).to_dense(), weights, atol=1e-5, rtol=1e-5)
    (grad,) = torch.autograd.grad(ours(x).sin().sum(), softmax.sink_logit)
    (expected_grad,) = torch.autograd.grad(expected.sin().sum(), theirs.sinks)
    torch.testing.assert_close(grad, expected_grad, atol=1e-5, rtol=1e-4)
