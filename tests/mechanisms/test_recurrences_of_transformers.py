"""Recurrences equal the modules of transformers, by random weights."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba2 import modeling_mamba2 as mamba
from transformers.models.minimax import modeling_minimax as minimax
from transformers.models.minimax.configuration_minimax import MiniMaxConfig
from transformers.models.qwen3_next import modeling_qwen3_next as qwen
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

from saccade import masks, mechanisms
from saccade.caches.recurrent import Memory

CAUSAL = masks.Causal()
LENGTH = 150


def heads_first(x):
    return x.transpose(1, 2)


def unit(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def tokens(heads=4, key_dim=16, value_dim=24):
    torch.manual_seed(0)
    query, key = (torch.randn(2, LENGTH, heads, key_dim) for _ in range(2))
    return query, key, torch.randn(2, LENGTH, heads, value_dim), torch.rand(2, LENGTH, heads)


DELTA_RULES = {
    "qwen3_next, chunks": (qwen.torch_chunk_gated_delta_rule, ()),
    "qwen3_next, steps": (qwen.torch_recurrent_gated_delta_rule, ()),
    "kimi_linear, chunks": (kimi.chunk_kimi_delta_attention, (16,)),
    "kimi_linear, steps": (kimi.recurrent_kimi_delta_attention, (16,)),
}
"""Functions, and the channels that a decay tells apart."""


@pytest.mark.parametrize("name", DELTA_RULES)
def test_gated_delta_rules(name):
    theirs, channels = DELTA_RULES[name]
    query, key, value, beta = tokens()
    decay, state = -F.softplus(torch.randn(2, LENGTH, 4, *channels)), torch.randn(2, 4, 16, 24)
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    expected, last = theirs(query, key, value, g=decay, beta=beta, **options)
    query, key, value, beta, decay = map(heads_first, (unit(query), unit(key), value, beta, decay))
    matrix = mechanisms.Delta()(query, key, beta=beta, decay=decay, mask=CAUSAL)
    out, memory = matrix.advance(value, Memory(state))
    torch.testing.assert_close(heads_first(out), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(memory.state, last, atol=1e-5, rtol=1e-5)


def test_the_scan_of_mamba2():
    query, key, value, step = tokens(heads=2)
    value, step = torch.randn(2, LENGTH, 4, 24), torch.randn(2, LENGTH, 4)
    ssd, skip, bias = mechanisms.SSD(4), torch.randn(4), torch.randn(4)
    expected, last = mamba.mamba2_chunk_scan(
        value,
        step,
        -ssd.log_rate.exp(),
        key,
        query,
        chunk_size=64,
        D=skip,
        dt_bias=bias,
        dt_softplus=True,
        return_final_states=True,
    )
    matrix = ssd(*map(heads_first, (query, key)), step=heads_first(F.softplus(step + bias)), mask=CAUSAL)
    out, memory = matrix.advance(heads_first(value), None)
    out = heads_first(out) + skip[:, None] * value
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(memory.state, last.mT, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("layer", [0, 2])
def test_lightning_attention_of_minimax(layer):
    torch.manual_seed(0)
    config = MiniMaxConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, num_hidden_layers=4, block_size=64, hidden_act="silu"
    )
    module = minimax.MiniMaxLightningAttention(config, layer).eval()
    x = torch.randn(2, LENGTH, 32)
    expected = module(x, position_embeddings=None, attention_mask=None)[0]
    query, key, value = F.silu(module.qkv_proj(x)).unflatten(2, (4, 24)).transpose(1, 2).chunk(3, -1)
    lightning = mechanisms.GatedLinear.lightning(4, layer, 4)
    out = lightning(query, key, mask=CAUSAL) @ value
    out = module.norm(out.transpose(1, 2).flatten(2))
    own = module.out_proj(torch.sigmoid(module.output_gate(x)) * out)
    torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)


def test_the_whole_layer_of_qwen3_next():
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        hidden_size=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        linear_conv_kernel_dim=4,
    )
    module = qwen.Qwen3NextGatedDeltaNet(config, 0).eval()
    nn.init.normal_(module.dt_bias)
    x = torch.randn(2, LENGTH, 32)
    expected = module(x)
    query, key, value, z, b, a = module.fix_query_key_value_ordering(module.in_proj_qkvz(x), module.in_proj_ba(x))
    mixed = torch.cat([y.flatten(2) for y in (query, key, value)], -1).mT
    mixed = F.silu(module.conv1d(mixed)[..., :LENGTH]).mT
    query, key, value = mixed.split([16, 16, 48], -1)
    query, key = (heads_first(unit(y.unflatten(2, (2, 8)))) for y in (query, key))
    decay = -module.A_log.float().exp() * F.softplus(a.float() + module.dt_bias)
    matrix = mechanisms.Delta()(query, key, beta=heads_first(b.sigmoid()), decay=heads_first(decay), mask=CAUSAL)
    out = heads_first(matrix @ heads_first(value.unflatten(2, (4, 12))))
    own = module.out_proj(module.norm(out.flatten(0, 2), z.reshape(-1, 12)).view(2, LENGTH, 48))
    torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)
