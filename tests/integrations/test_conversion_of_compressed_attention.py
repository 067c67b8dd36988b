"""Compressed attention of transformers (DeepSeek V4), converted: equal outputs and matrices, also step by step."""

import itertools

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config, DynamicCache
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

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


@torch.no_grad()
def test_rows_differ_only_where_the_last_selected_score_is_tied() -> None:
    n, rate, k = 300, 4, 9
    theirs = _v4("compressed_sparse_attention", index_n_heads=2, index_topk=k, max_position_embeddings=n)
    ours, x, noted = from_transformers(theirs), torch.randn(1, n, 32), {}
    indexer = theirs.compressor.indexer
    indexer.scorer.register_forward_hook(lambda _, __, scores: noted.update(scores=scores[0]))
    indexer.register_forward_hook(lambda _, __, index: noted.update(index=index[0]))
    expected, _ = _call_v4(theirs, x, 0, None)
    error = (ours(x) - expected)[0].abs().amax(1)
    entries, finished = n // rate, (torch.arange(n)[:, None] + 1) // rate
    chosen = noted["index"].masked_fill(noted["index"] < 0, entries)
    chosen = torch.zeros(n, entries + 1, dtype=torch.bool).scatter(1, chosen, True)[:, :entries]
    own = (ours.matrix(x).to_dense()[0, :, :, :entries] > 0).any(0)
    scores = noted["scores"].masked_fill(torch.arange(entries) >= finished, -torch.inf).sort(1, descending=True).values
    is_tied = (scores[:, k - 1] - scores[:, k] < 1e-4) & (finished[:, 0] > k)  # angles are rounded at far positions
    differs = (own != chosen).any(1)
    assert not (differs & ~is_tied).any()
    assert error[~differs].max() < 1e-5
    # Both scores of a tie are 0: each of the two index heads has a negative product.
    assert differs.any()
    assert (scores[differs, k - 1] == scores[differs, k]).all()


def test_a_window_without_entries_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="it has only a window, and a CompressedAttention reads compressed"):
        from_transformers(_v4("sliding_attention"))
