"""Latent attention of transformers, converted: equal outputs and matrices, in both forms."""

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

from saccade import masks
from saccade.integrations.transformers import from_transformers

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


def test_unsupported_layers_are_refused() -> None:
    config = DeepseekV3Config(hidden_size=16, num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=4)
    theirs = v3.DeepseekV3Attention(config, 0)
    theirs.kv_b_proj = torch.nn.Sequential(theirs.kv_b_proj)
    with pytest.raises(
        NotImplementedError, match="its kv_b_proj is Sequential; saccade's layer has a plain linear layer"
    ):
        from_transformers(theirs)
    with pytest.raises(
        TypeError, match="be a DeepseekV2Attention, DeepseekV3Attention or DiffLlamaAttention; got Linear"
    ):
        from_transformers(torch.nn.Linear(2, 2))
