"""Latent and compressed attention of transformers, converted: equal outputs and matrices, also step by step."""

import itertools

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config, DeepseekV4Config, DynamicCache
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

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


def _v4(kind: str, rope: dict | None = None, **changes: object) -> v4.DeepseekV4Attention:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 12}
    sizes |= {"index_n_heads": 16, "index_head_dim": 12, "index_topk": 3}  # with few heads, many scores would be 0
    sizes |= {"o_groups": 2, "o_lora_rank": 6, "sliding_window": 7, "max_position_embeddings": 128}
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 5}
    config = DeepseekV4Config(
        **(sizes | changes), num_hidden_layers=1, layer_types=[kind], compress_rates=rates, rope_parameters=rope
    )
    config._attn_implementation = "eager"
    theirs = v4.DeepseekV4Attention(config, 0).eval()
    with torch.no_grad():
        for own in theirs.parameters():
            own.copy_(torch.randn_like(own) * 0.3 + (own.dim() == 1))
    return theirs


def _call_v4(
    theirs: v4.DeepseekV4Attention, x: Tensor, start: int, cache: DynamicCache | None
) -> tuple[Tensor, Tensor]:
    """Call transformers' layer with new tokens from a position on."""
    config, q_len = theirs.config, x.shape[1]
    positions = torch.arange(start, start + q_len)[None].expand(len(x), -1)
    angles = {"compress": v4.DeepseekV4RotaryEmbedding(config)(x, positions, layer_type="compress")}
    stored = min(start, config.sliding_window - 1)
    distance = positions[:1].mT - torch.arange(start - stored, start + q_len)
    hidden = (distance < 0) | (distance >= config.sliding_window)
    mask = torch.zeros_like(distance, dtype=x.dtype).masked_fill(hidden, -torch.inf)
    return theirs(x, angles, positions, mask.expand(len(x), 1, -1, -1), cache)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rope", [None, {**YARN, "factor": 4.0, "mscale": None, "mscale_all_dim": None}], ids=str)
@pytest.mark.parametrize("kind", ["compressed_sparse_attention", "heavily_compressed_attention"])
def test_compressed_attention_of_transformers_is_the_same(kind: str, rope: dict | None, dtype: torch.dtype) -> None:
    rope = None if rope is None else {key: x for key, x in rope.items() if x is not None and key != "rope_theta"}
    theirs = _v4(kind, rope).to(dtype)
    ours, x = from_transformers(theirs), torch.randn(2, 43, 32, dtype=dtype)
    expected, weights = _call_v4(theirs, x, 0, None)
    tolerance = {"atol": 1e-5, "rtol": 1e-5}  # their norms, rotations and scores are computed in float32
    torch.testing.assert_close(ours(x), expected, **tolerance)
    own = ours.matrix(x).to_dense()
    entries = own.shape[3] - 43
    torch.testing.assert_close(torch.cat([own[..., entries:], own[..., :entries]], 3), weights, **tolerance)
    for edges in ([0, 20, 21, 22, 30, 43], range(44), [0, 3, 7, 43]):
        cache, mine = DynamicCache(config=theirs.config), ours.new_cache()
        for start, stop in itertools.pairwise(edges):
            new = x[:, start:stop]
            torch.testing.assert_close(ours(new, cache=mine), _call_v4(theirs, new, start, cache)[0], **tolerance)


def test_a_window_without_entries_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="it has only a window, and a CompressedAttention reads compressed"):
        from_transformers(_v4("sliding_attention"))


def test_unsupported_layers_are_refused() -> None:
    config = DeepseekV3Config(hidden_size=16, num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=4)
    theirs = v3.DeepseekV3Attention(config, 0)
    theirs.kv_b_proj = torch.nn.Sequential(theirs.kv_b_proj)
    with pytest.raises(
        NotImplementedError, match="its kv_b_proj is Sequential; saccade's layer has a plain linear layer"
    ):
        from_transformers(theirs)
    with pytest.raises(
        TypeError, match="be a DeepseekV2Attention, DeepseekV3Attention, DeepseekV4Attention or DiffLlamaAttention"
    ):
        from_transformers(torch.nn.Linear(2, 2))
