"""The format of the published folders of Llama, Mistral and Qwen2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from saccade.masks import sliding_window
from saccade.masks.convert.patterns import window_size
from saccade.models.checkpoint_format import (
    ACTIVATIONS,
    DecoderFormat,
    differences,
    end_tokens_of,
    reasons_without_words,
)
from saccade.models.config import DecoderConfig
from saccade.models.rope_config import rope_base, rope_reasons, rope_scaling, rope_words


class Llama(DecoderFormat):
    """Rotary positions, root-mean-square norms first, gated networks; Touvron et al. 2023, arXiv:2302.13971.

    Mistral has a sliding window (Jiang et al. 2023, arXiv:2310.06825), Qwen2 a bias in three of the projections.
    """

    stacks = {"num_layers": ("stack.layers", "model.layers")}
    names = {
        "embedding": "model.embed_tokens",
        "stack.final_norm": "model.norm",
        "head": "lm_head",
        "attention_norm": "input_layernorm",
        "attention.query_projection": "self_attn.q_proj",
        "attention.key_projection": "self_attn.k_proj",
        "attention.value_projection": "self_attn.v_proj",
        "attention.output_projection": "self_attn.o_proj",
        "feed_forward_norm": "post_attention_layernorm",
        "feed_forward.gate": "mlp.gate_proj",
        "feed_forward.expand": "mlp.up_proj",
        "feed_forward.contract": "mlp.down_proj",
    }
    prefix = "model."
    activation = "silu"
    ignored = ("rotary_emb.inv_freq",)

    def reasons_to_read(self, config: Mapping[str, Any]) -> list[str]:
        reasons = rope_reasons(config) + self._activation_reasons(config)
        width, heads, head_dim = (config.get(key) for key in ("hidden_size", "num_attention_heads", "head_dim"))
        if head_dim is not None and width is not None and heads and head_dim * heads != width:
            reasons.append(f"head_dim is {head_dim}, not hidden_size / num_attention_heads = {width} / {heads}")
        kinds = set(config.get("layer_types") or ())
        if not kinds <= {"sliding_attention" if _window(config) else "full_attention"}:
            reasons.append(f"layer_types names {' and '.join(sorted(kinds))}: layers of different masks")
        return reasons

    def read_config(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> DecoderConfig:
        window = _window(config)
        kind = config.get("model_type")
        return DecoderConfig(
            **self._required(config),
            num_kv_heads=config.get("num_key_value_heads"),
            mask=sliding_window(window) if window else None,
            rotary_base=rope_base(config),
            rotary_scaling=rope_scaling(config),
            activation=ACTIVATIONS[self._activation(config)],
            norm_eps=config.get("rms_norm_eps", 1e-6),
            attention_bias=kind == "qwen2" or (kind == "llama" and config.get("attention_bias", False)),
            feed_forward_bias=kind == "llama" and config.get("mlp_bias", False),
            tied=config.get("tie_word_embeddings", False),
            attention_dropout_p=config.get("attention_dropout", 0.0),
            end_tokens=end_tokens_of(config),
        )

    def reasons_to_write(self, config: DecoderConfig) -> list[str]:
        ours = {"position_encoding": "rotary", "norm": "rms", "gated": True, "dropout_p": 0.0}
        reasons = differences(config, ours) + reasons_without_words(config)
        if window_size(config.causal_mask) is not None and (config.attention_bias or config.feed_forward_bias):
            reasons.append("it has a sliding window, which is Mistral's, and biases, which Mistral has not")
        return reasons

    def write_config(self, config: DecoderConfig) -> dict[str, Any]:
        window = window_size(config.causal_mask)
        special: dict[str, Any] = {"sliding_window": window}
        if window is None:
            special = {"attention_bias": config.attention_bias, "mlp_bias": config.feed_forward_bias}
        return {
            "model_type": "llama" if window is None else "mistral",
            "architectures": ["LlamaForCausalLM" if window is None else "MistralForCausalLM"],
            **{key: getattr(config, ours) for key, ours in self.sizes.items()},
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.embed_dim // config.num_heads,
            "hidden_act": "gelu_pytorch_tanh" if config.activation == "gelu_tanh" else config.activation,
            "rms_norm_eps": config.norm_eps,
            "rope_parameters": rope_words(config.rotary_base, config.rotary_scaling),
            "tie_word_embeddings": config.tied,
            "attention_dropout": config.attention_dropout_p,
            **special,
            "bos_token_id": None,
            "eos_token_id": list(config.end_tokens) or None,
        }


class Qwen2(Llama):
    """Llama without a bias in the output projection of the attention; ours is set to 0."""

    def clean_weights(self, weights: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
        cleaned = super().clean_weights(weights, config)
        for layer in range(config.num_layers):
            cleaned.setdefault(f"model.layers.{layer}.self_attn.o_proj.bias", torch.zeros(config.embed_dim))
        return cleaned


def _window(config: Mapping[str, Any]) -> int | None:
    """Return how many last tokens a token sees; None if it sees all."""
    if config.get("model_type") == "llama" or config.get("use_sliding_window", True) is False:
        return None
    return config.get("sliding_window")
