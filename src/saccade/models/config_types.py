"""Of what type the values of config.json are: a file is data from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from saccade.errors import value_error

__all__ = ["check_types"]

_INTS = (
    *("vocab_size", "max_position_embeddings", "hidden_size", "num_attention_heads", "num_hidden_layers"),
    *("intermediate_size", "type_vocab_size", "pad_token_id", "num_key_value_heads", "head_dim", "sliding_window"),
    *("n_positions", "n_embd", "n_head", "n_layer", "n_inner"),
    *("max_len", "embed_dim", "num_heads", "num_kv_heads", "num_layers", "feed_forward_dim", "window"),
    "original_max_position_embeddings",
)
_NUMBERS = (
    *("layer_norm_eps", "hidden_dropout_prob", "attention_probs_dropout_prob", "rms_norm_eps", "attention_dropout"),
    *("layer_norm_epsilon", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
    *("norm_eps", "dropout_p", "attention_dropout_p"),
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"),
    *("mscale", "mscale_all_dim", "partial_rotary_factor"),
)
_SWITCHES = (
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "is_decoder", "add_cross_attention"),
    *("scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
    *("gated", "feed_forward_bias", "tied", "truncate"),
)
_NAMES = (
    *("model_type", "hidden_act", "activation_function", "position_embedding_type"),
    *("position_encoding", "activation", "norm", "rope_type", "type"),
)
_MOST = 1 << 31  # of anything that is counted: products of two sizes then fit into 64 bits


def check_types(where: str, config: Mapping[str, Any]) -> None:
    """Raise unless every value that we read is of the type that it is read as; null stands for what is not said.

    Args:
        where: who reads.
        config: what config.json says, in any form that we know.

    Raises:
        ValueError: a value of another type; its key is named.
    """
    _check_each(where, config, "config.json")
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(config.get(key), Mapping):  # what else it may be is told where it is read
            _check_each(where, config[key], f"{key} of config.json")
    ends = config.get("eos_token_id")
    if not (ends is None or _is_int(ends) or _is_list_of(ends, int)):
        raise value_error(where, "eos_token_id in config.json", "be an int or a list of ints", repr(ends))
    for key, kind, told in (("end_tokens", int, "ints"), ("layer_types", str, "names")):
        if config.get(key) is not None and not _is_list_of(config[key], kind):
            raise value_error(where, f"{key} in config.json", f"be a list of {told}", repr(config[key]))


def _check_each(where: str, told: Mapping[str, Any], name: str) -> None:
    rules = (
        (_INTS, _is_int, "be an int below 2**31"),
        (_NUMBERS, _is_number, "be a number"),
        (_SWITCHES, lambda value: isinstance(value, bool), "be true or false"),
        (_NAMES, lambda value: isinstance(value, str), "be a name"),
    )
    for keys, fits, rule in rules:
        for key in keys:
            if told.get(key) is not None and not fits(told[key]):
                raise value_error(where, f"{key} in {name}", rule, repr(told[key]))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**300)


def _is_list_of(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(one, kind) and not isinstance(one, bool) for one in value)
