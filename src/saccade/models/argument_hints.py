"""What others call the arguments of configurations and of generation."""

from collections.abc import Mapping

from saccade.support.argument_hints import FOREIGN_NAMES

__all__ = ["OF_CONFIGS", "OF_GENERATION"]

_SAMPLER = "sampler=Sampler(temperature=..., top_k=..., top_p=...); without one the likeliest token is taken"

OF_GENERATION: Mapping[str, str] = {
    **dict.fromkeys(("temperature", "top_k", "top_p", "do_sample"), _SAMPLER),
    "num_beams": "beam_search(model, tokens, max_new_tokens, beams=...)",
    **dict.fromkeys(("max_length", "max_tokens", "max_len"), "max_new_tokens=, which does not count the prompt"),
    **dict.fromkeys(("eos_token_id", "stop_token", "eos"), "stop="),
    **dict.fromkeys(("past_key_values", "use_cache"), "cache=, as model.new_cache() makes one"),
    **dict.fromkeys(("input_ids", "prompt", "prompts", "inputs"), "tokens="),
}

OF_CONFIGS: Mapping[str, str] = {
    **FOREIGN_NAMES,
    **dict.fromkeys(("vocab", "num_tokens", "n_vocab"), "vocab_size="),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "block_size", "context_length", "seq_len"), "max_len="),
    "n_embd": "embed_dim=",
    "n_head": "num_heads=",
    **dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer", "depth", "layers"), "num_layers="),
    **dict.fromkeys(
        ("dim_feedforward", "intermediate_size", "ffn_dim", "hidden_dim", "mlp_dim", "n_inner"), "feed_forward_dim="
    ),
    **dict.fromkeys(("hidden_dropout_prob", "resid_pdrop"), "dropout_p="),
    **dict.fromkeys(("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"), "attention_dropout_p="),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), "norm_eps="),
    **dict.fromkeys(("hidden_act", "activation_function"), "activation="),
    "tie_word_embeddings": "tied=",
    "rope_theta": "rotary_base=",
    "rope_scaling": "rotary_scaling=",
    "eos_token_id": "end_tokens=",
}
