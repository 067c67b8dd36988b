"""Latent attention of transformers, converted: equal outputs and matrices, in both forms."""

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV3Config, DeepseekV32Config, DynamicCache, GlmMoeDsaConfig
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as v32
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from saccade import masks
from saccade.integrations.transformers import from_transformers
from saccade.nn import DecoderLayer, DecoderStack

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 500.0}, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("q_rank", [None, 12])
@pytest.mark.parametrize("kind", ["v2", "v3", "v3 half"])
def test_transformers_computes_the_same(kind: str, q_rank: int | None, rope: dict, form: str) -> None:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": q_rank,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 10,
        "rope_parameters": dict(rope),
        "max_position_embeddings": 2560,
        "attention_bias": kind == "v2",
    }
    if kind == "v2":
        config, attention, turn = DeepseekV2Config(**sizes), v2.DeepseekV2Attention, v2.DeepseekV2RotaryEmbedding
    else:
        config = DeepseekV3Config(**sizes, rope_interleave=kind == "v3")
        attention, turn = v3.DeepseekV3Attention, v3.DeepseekV3RotaryEmbedding
    config._attn_implementation = "eager"
    theirs = attention(config, 0).eval()
    with torch.no_grad():
        for own in theirs.parameters():
            own.copy_(torch.randn_like(own) * 0.2 + (own.dim() == 1))
    ours = from_transformers(theirs)
    assert not ours.training
    ours.form = form
    x = torch.randn(2, 11, 32)
    hidden = torch.zeros(1, 1, 11, 11).masked_fill(~masks.Causal().to_dense(11), torch.finfo(torch.float32).min)
    angles = turn(config)(x, torch.arange(11)[None])
    expected, weights = theirs(x, position_embeddings=angles, attention_mask=hidden)
    torch.testing.assert_close(ours(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.matrix(x).to_dense(), weights, atol=1e-5, rtol=1e-5)


SPARSE = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "max_position_embeddings": 2560,
    "index_topk": 4,
    "index_n_heads": 16,  # with so many heads, no two scores are 0
    "index_head_dim": 24,
}


def _causal(length: int) -> Tensor:
    allowed = masks.Causal().to_dense(length)
    return torch.zeros(1, 1, length, length).masked_fill(~allowed, torch.finfo(torch.float32).min)


def _drawn(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for own in module.parameters():
            own.copy_(torch.randn_like(own) * 0.2 + (own.dim() == 1))
    return module.eval()


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 500.0}, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("kind", ["DeepSeek", "GLM"])
def test_keys_that_an_indexer_selects_are_the_same(kind: str, rope: dict, form: str) -> None:
    if kind == "DeepSeek":
        config = DeepseekV32Config(**SPARSE, rope_parameters=dict(rope))
        attention, turn = v32.DeepseekV32Attention, v32.DeepseekV32RotaryEmbedding
    else:
        config = GlmMoeDsaConfig(**SPARSE, rope_parameters=dict(rope), indexer_types=["full"] * 3)
        attention, turn = glm.GlmMoeDsaAttention, glm.GlmMoeDsaRotaryEmbedding
    config._attn_implementation = "eager"
    theirs = _drawn(attention(config, 0))
    ours = from_transformers(theirs)
    ours.form = form
    x, angles = torch.randn(2, 31, 32), turn(config)
    expected, weights, *_ = theirs(x, angles(x, torch.arange(31)[None]), _causal(31))
    torch.testing.assert_close(ours(x), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.matrix(x).to_dense(), weights, atol=1e-5, rtol=1e-5)
    cache, past = ours.new_cache(), DynamicCache(config=config)
    with torch.no_grad():
        for start, stop in ((0, 20), (20, 21), (21, 31)):
            at = torch.arange(start, stop)[None]
            hidden = _causal(stop)[:, :, start:]
            expected, *_ = theirs(x[:, start:stop], angles(x, at), hidden, past_key_values=past)
            torch.testing.assert_close(ours(x[:, start:stop], cache=cache), expected, atol=1e-5, rtol=1e-5)


def test_layers_of_glm_that_share_a_selection_are_the_same() -> None:
    """Two of three layers attend to the keys that the first one selects."""
    kinds = ["full", "shared", "shared"]
    config = GlmMoeDsaConfig(
        **SPARSE, vocab_size=7, intermediate_size=8, indexer_types=kinds, first_k_dense_replace=3, rms_norm_eps=1e-6
    )
    config._attn_implementation = "eager"
    model = _drawn(glm.GlmMoeDsaModel(config))
    ours = DecoderStack(_converted(model), final_norm=model.norm)
    x = torch.randn(2, 31, 32)
    cache, past = ours.new_cache(), DynamicCache(config=config)
    assert [layer.attention.source for layer in ours.layers] == [None, 0, 0]
    with torch.no_grad():
        expected = model(inputs_embeds=x, use_cache=False).last_hidden_state
        torch.testing.assert_close(ours(x), expected, atol=1e-5, rtol=1e-5)
        for part in x.split([20, 1, 10], 1):
            expected = model(inputs_embeds=part, past_key_values=past).last_hidden_state
            torch.testing.assert_close(ours(part, cache=cache), expected, atol=1e-5, rtol=1e-5)


def _converted(model: nn.Module) -> list[DecoderLayer]:
    """Return decoder layers with the converted attention of a model, and its own norms and feed-forward networks."""
    layers = []
    for theirs in model.layers:
        layer = DecoderLayer(from_transformers(theirs.self_attn), theirs.mlp, norm="rms")
        layer.attention_norm, layer.feed_forward_norm = theirs.input_layernorm, theirs.post_attention_layernorm
        layers.append(layer)
    return layers


def test_unsupported_layers_are_refused() -> None:
    config = DeepseekV3Config(hidden_size=16, num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=4)
    theirs = v3.DeepseekV3Attention(config, 0)
    theirs.kv_b_proj = torch.nn.Sequential(theirs.kv_b_proj)
    with pytest.raises(
        NotImplementedError, match="its kv_b_proj is Sequential; saccade's layer has a plain linear layer"
    ):
        from_transformers(theirs)
    with pytest.raises(
        TypeError,
        match=r"be a DeepseekV2Attention, (.*), DeepseekV4Attention or DiffLlamaAttention; got Linear",
    ):
        from_transformers(torch.nn.Linear(2, 2))
