"""Our multi-head attention with positions against the layers of transformers that use them."""

import pytest
import torch
from transformers import BloomConfig, LlamaConfig, T5Config
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.t5.modeling_t5 import T5Attention

from saccade import masks, nn, positions
from saccade.mechanisms import Softmax


def copied(ours, theirs):
    """Weights of four linear layers, in the order query, key, value, output."""
    layers = (ours.query_projection, ours.key_projection, ours.value_projection, ours.output_projection)
    for layer, weight in zip(layers, theirs, strict=True):
        layer.weight.data.copy_(weight)


def additive_causal(n):
    return torch.zeros(1, 1, n, n).masked_fill(~masks.Causal().to_dense(n), torch.finfo(torch.float32).min)


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
