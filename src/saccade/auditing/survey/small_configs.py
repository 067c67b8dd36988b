"""Small sizes for any architecture of transformers: those of its defaults that are sizes, each made small."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import resources
from typing import Any

VOCABULARY = 101
"""How many tokens every small model knows."""

# The first pattern that matches a whole name gives its size. What none matches keeps its default.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"(\w*_)?vocab_size|n_vocab", VOCABULARY),
    (r"pad_token_id", 0),
    (r"bos_token_id", 1),
    (r"(eos|sep)_token_id", 2),
    (r"(unk|mask|cls|image|video|audio)_token_(id|index)", 3),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq(uence)?_len(gth)?|context_length", 128),
    (r"(num|n|(encoder|decoder)(_num)?)(_hidden|_encoder|_decoder)?_layers?|(encoder|decoder)_layers|depth", 2),
    (r"num_(key_value|kv)_(heads|groups)|n_head_kv|multi_query_group_num|linear_num_key_heads", 2),
    (r"(linear|mamba|gdn|kda)_(num|n)_(key|value|v|k)?_?heads", 4),
    (r"(num_|n_|(encoder|decoder)_)?(attention_)?heads?", 4),
    (r"((global|attention|attn|kv|swa)_)?head_(dim|size)|linear_(key|value)_head_dim|kv_channels|d_kv", 16),
    (r"v_head_dim|qk_(rope|nope)_head_dim", 16),
    (r"(q|o|kv)_lora_rank", 32),
    (r"(\w*_)?(intermediate|ffn_hidden|ffn|feed_forward|mlp)_(size|dim)|d_ff|d_inner|n_inner|inner_dim", 96),
    (r"hidden_(size|dim)|(word_)?embed(ding)?_(proj_)?(size|dim)|d_model|n_embd|d_embed|(emb_|model_)?dim", 64),
    (r"(num_|n_)?(local_|routed_|moe_)?(num_)?experts|moe_num_experts", 4),
    (r"(num|n)_shared_experts|(topk|n)_group|num_expert_groups?|first_k_dense_replace", 1),
    (r"(num_)?experts_per_tok(en)?|top_k|moe_k|(router|moe)_top_?k|num_(selected_experts|experts_per_token)", 2),
    (r"(global_attention_)?(sliding|attention|local)_(window|attention)(_size)?|window_size", 8),
    (r"(mamba_)?chunk_size|mamba_d_state|(ssm_)?state_size|mamba_state_dim", 8),
    (r"(mamba_)?dt_rank|time_step_rank", 8),
)


def small_sizes(config_class: Any) -> dict[str, Any]:
    """Arguments of a configuration: small sizes in the place of its defaults, a layer of each kind that it has.

    What an architecture needs besides stands in small.toml.
    """
    own = _exceptions().get(config_class.model_type, {})
    return _shrunk(config_class()) | own


def _shrunk(defaults: Any) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, value in defaults.to_dict().items():
        if name in getattr(defaults, "sub_configs", {}):
            if (inner := getattr(defaults, name)) is not None:
                given[name] = _shrunk(inner)
        elif type(value) is int or (value is None and "token" in name):
            size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), None)
            given |= {} if size is None else {name: size}
    if "kv_lora_rank" in given and "num_key_value_heads" in given:  # multi-head latent attention has no groups
        given["num_key_value_heads"] = given["num_attention_heads"]
    if "layer_types" in vars(defaults) and (kinds := defaults.layer_types):  # a property of some
        kinds = list(dict.fromkeys(kinds))
        given["layer_types"] = kinds * 2 if len(kinds) == 1 else kinds
        given |= {
            name: len(given["layer_types"]) for name in ("num_hidden_layers", "n_layers", "n_layer") if name in given
        }
    return given


@cache
def _exceptions() -> dict[str, dict[str, Any]]:
    return tomllib.loads(resources.files(__package__).joinpath("small.toml").read_text("utf-8"))
