"""What types the values in config.json must have: the file is data from elsewhere, and nothing in it is trusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from saccade.arguments import is_finite_number, is_integer
from saccade.errors import value_error

__all__ = ["check_types"]


def _is_list(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(type(one) is kind for one in value)


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "be an int below 2**31": (
        lambda value: is_integer(value) and abs(value) < 1 << 31,  # products of two sizes then fit into 64 bits
        "vocab_size max_position_embeddings hidden_size num_attention_heads num_hidden_layers intermediate_size "
        "type_vocab_size pad_token_id num_key_value_heads head_dim sliding_window "
        "n_positions n_embd n_head n_layer n_inner original_max_position_embeddings "
        "max_len embed_dim num_heads num_kv_heads num_layers feed_forward_dim window",
    ),
    "be a number": (
        is_finite_number,
        "layer_norm_eps hidden_dropout_prob attention_probs_dropout_prob rms_norm_eps attention_dropout "
        "layer_norm_epsilon resid_pdrop embd_pdrop attn_pdrop norm_eps dropout_p attention_dropout_p "
        "rope_theta factor low_freq_factor high_freq_factor beta_fast beta_slow attention_factor mscale mscale_all_dim "
        "partial_rotary_factor",
    ),
    "be true or false": (
        lambda value: isinstance(value, bool),
        "tie_word_embeddings attention_bias mlp_bias use_sliding_window is_decoder add_cross_attention "
        "scale_attn_weights scale_attn_by_inverse_layer_idx gated feed_forward_bias tied truncate",
    ),
    "be a name": (
        lambda value: isinstance(value, str),
        "model_type hidden_act activation_function position_embedding_type position_encoding activation norm "
        "rope_type type",
    ),
    "be an int or a list of ints": (lambda value: is_integer(value) or _is_list(int)(value), "eos_token_id"),
    "be a list of ints": (_is_list(int), "end_tokens"),
    "be a list of names": (_is_list(str), "layer_types"),
}
_CHECKS = {key: (fits, rule) for rule, (fits, keys) in _RULES.items() for key in keys.split()}


def check_types(where: str, config: Mapping[str, Any], name: str = "config.json") -> None:
    """Raise unless every value that we read has the type that it is read as; null stands for a missing value.

    Args:
        where: the function, for the error message.
        config: the contents of config.json, of any family that we know.
        name: what the message calls it.

    Raises:
        ValueError: a value of another type; its key is named.
    """
    for key, value in config.items():
        fits, rule = _CHECKS.get(key, (None, ""))
        if fits is not None and value is not None and not fits(value):
            raise value_error(where, f"{key} in {name}", rule, repr(value))
        if name == "config.json" and key.startswith("rope_") and isinstance(value, Mapping):
            check_types(where, value, f"{key} of {name}")
