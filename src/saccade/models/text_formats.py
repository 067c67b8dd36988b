"""The file formats of published text models: BERT, GPT-2, Llama, Mistral and Qwen2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from saccade.masks import sliding_window
from saccade.masks.convert.patterns import window_size
from saccade.models.checkpoint_format import (
    ACTIVATIONS,
    PLAIN,
    DecoderFormat,
    FileFormat,
    differences,
    end_tokens_of,
    reasons_no_format_can_express,
)
from saccade.models.config import EncoderConfig
from saccade.models.decoder_config import DecoderConfig
from saccade.models.rope_config import rope_base, rope_parameters_of, rope_reasons, rope_scaling

_OPTIONAL = {
    "type_vocab_size": "num_token_types",
    "hidden_act": "activation",
    "layer_norm_eps": "norm_eps",
    "hidden_dropout_prob": "dropout_p",
    "attention_probs_dropout_prob": "attention_dropout_p",
    "pad_token_id": "pad_token",
}
# No hidden state depends on the pooler, the table of 0, 1, 2, ... or the task heads.
_UNUSED_WEIGHTS = ("pooler.", "embeddings.position_ids", "cls.", "classifier.", "qa_outputs.")


class Bert(FileFormat):
    """BERT's format, with learned positions and post-norm layers; Devlin et al. 2019, arXiv:1810.04805."""

    activation = "gelu"
    stacks = {"num_layers": ("layers", "encoder.layer")}
    names = {
        "embeddings.word": "embeddings.word_embeddings",
        "embeddings.position": "embeddings.position_embeddings",
        "embeddings.token_type": "embeddings.token_type_embeddings",
        "embeddings.norm": "embeddings.LayerNorm",
        "attention.query_projection": "attention.self.query",
        "attention.key_projection": "attention.self.key",
        "attention.value_projection": "attention.self.value",
        "attention.output_projection": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "feed_forward.expand": "intermediate.dense",
        "feed_forward.contract": "output.dense",
        "feed_forward_norm": "output.LayerNorm",
    }

    def reasons_to_read(self, config: Mapping[str, Any]) -> list[str]:
        reasons = []
        positions = config.get("position_embedding_type") or "absolute"
        if positions != "absolute":
            reasons.append(f"position_embedding_type is {positions!r}, not 'absolute'")
        reasons += self._activation_reasons(config)
        decoding = ("is_decoder", "add_cross_attention")
        return reasons + [f"{key} is true: this is not an encoder" for key in decoding if config.get(key)]

    def read_config(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> EncoderConfig:
        fields = self._required(config)
        # As in transformers, a null value means the default.
        fields |= {ours: config[key] for key, ours in _OPTIONAL.items() if config.get(key) is not None}
        if "activation" in fields:
            fields["activation"] = ACTIVATIONS[fields["activation"]]
        return EncoderConfig(**fields)

    def write_config(self, config: EncoderConfig) -> dict[str, Any]:
        activation = next(name for name, ours in ACTIVATIONS.items() if ours == config.activation)
        fields = {theirs: getattr(config, ours) for theirs, ours in {**self.sizes, **_OPTIONAL}.items()}
        return {"model_type": "bert", "architectures": ["BertModel"], **fields, "hidden_act": activation}

    def sides(self, config: EncoderConfig) -> tuple[str, ...]:
        return ("vocab_size", "max_len", "num_token_types", "embed_dim", "feed_forward_dim")

    def clean_weights(self, weights: Mapping[str, Tensor], config: EncoderConfig) -> dict[str, Tensor]:
        """Return BERT's weights without the prefix ``bert.``, with gamma and beta renamed to weight and bias."""
        renamed = {
            name.removeprefix("bert.")
            .replace("LayerNorm.gamma", "LayerNorm.weight")
            .replace("LayerNorm.beta", "LayerNorm.bias"): weight
            for name, weight in weights.items()
        }
        return {name: weight for name, weight in renamed.items() if not name.startswith(_UNUSED_WEIGHTS)}


_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


class GPT2(DecoderFormat):
    """GPT-2's format: learned positions, pre-norm layers, one fused query-key-value projection; Radford et al. 2019."""

    sizes = {
        "vocab_size": "vocab_size",
        "n_positions": "max_len",
        "n_embd": "embed_dim",
        "n_head": "num_heads",
        "n_layer": "num_layers",
    }
    stacks = {"num_layers": ("stack.layers", "transformer.h")}
    names = {
        "embedding": "transformer.wte",
        "position": "transformer.wpe",
        "stack.final_norm": "transformer.ln_f",
        "head": "lm_head",
        "attention_norm": "ln_1",
        "attention.query_projection": "attn.c_attn",
        "attention.key_projection": "attn.c_attn",
        "attention.value_projection": "attn.c_attn",
        "attention.output_projection": "attn.c_proj",
        "feed_forward_norm": "ln_2",
        "feed_forward.expand": "mlp.c_fc",
        "feed_forward.contract": "mlp.c_proj",
    }
    prefix = "transformer."
    activation_key, activation = "activation_function", "gelu_new"
    ignored = (".attn.bias", ".attn.masked_bias")

    def reasons_to_read(self, config: Mapping[str, Any]) -> list[str]:
        reasons = self._activation_reasons(config)
        if config.get("scale_attn_weights", True) is not True:
            reasons.append("scale_attn_weights is not true: saccade always scales scores")
        reasons += [
            f"{key} is true, which saccade does not support"
            for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention")
            if config.get(key)
        ]
        dropouts = {key: config.get(key, 0.1) for key in ("resid_pdrop", "embd_pdrop")}
        if len(set(dropouts.values())) > 1:
            reasons.append(
                f"{dropouts} differ: saccade has one dropout probability for embeddings and sublayer outputs"
            )
        return reasons

    def read_config(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> DecoderConfig:
        sizes = self._required(config)
        inner = config.get("n_inner")
        return DecoderConfig(
            **sizes,
            feed_forward_dim=4 * sizes["embed_dim"] if inner is None else inner,
            position_encoding="learned",
            activation=ACTIVATIONS[self._activation(config)],
            gated=False,
            norm="layer",
            norm_eps=config.get("layer_norm_epsilon", 1e-5),
            attention_bias=True,
            feed_forward_bias=True,
            tied=config.get("tie_word_embeddings", True),
            dropout_p=config.get("resid_pdrop", 0.1),
            attention_dropout_p=config.get("attn_pdrop", 0.1),
            end_tokens=end_tokens_of(config),
        )

    def reasons_to_write(self, config: DecoderConfig) -> list[str]:
        ours = {"position_encoding": "learned", "norm": "layer", "gated": False, "mask": None}
        ours |= {"attention_bias": True, "feed_forward_bias": True, "kv_heads": config.num_heads, "head_dim": None}
        return differences(config, {**PLAIN, **ours})

    def write_config(self, config: DecoderConfig) -> dict[str, Any]:
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            **{key: getattr(config, ours) for key, ours in self.sizes.items()},
            "n_inner": config.feed_forward_dim,
            "activation_function": "gelu_new" if config.activation == "gelu_tanh" else config.activation,
            "layer_norm_epsilon": config.norm_eps,
            "resid_pdrop": config.dropout_p,
            "embd_pdrop": config.dropout_p,
            "attn_pdrop": config.attention_dropout_p,
            "tie_word_embeddings": config.tied,
            "bos_token_id": None,
            "eos_token_id": list(config.end_tokens) or None,
        }

    def _is_transposed(self, name: str) -> bool:
        return name.endswith(_TRANSPOSED)  # GPT-2 stores linear layers as convolutions


class Llama(DecoderFormat):
    """Llama's format: rotary positions, RMS pre-norms and gated feed-forward networks; see arXiv:2302.13971.

    Mistral adds a sliding window (Jiang et al. 2023, arXiv:2310.06825). Qwen2 adds biases to the projections of
    queries, keys and values.
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
        kinds = set(config.get("layer_types") or ())
        if not kinds <= {"sliding_attention" if _window(config) else "full_attention"}:
            reasons.append(
                f"layer_types names {' and '.join(sorted(kinds))}, but layers with different masks are not supported"
            )
        return reasons

    def read_config(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> DecoderConfig:
        window = _window(config)
        kind = config.get("model_type")
        return DecoderConfig(
            **self._required(config),
            num_kv_heads=config.get("num_key_value_heads"),
            head_dim=config.get("head_dim"),
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
        reasons = differences(config, {**PLAIN, **ours}) + reasons_no_format_can_express(config)
        if window_size(config.causal_mask) is not None and (config.attention_bias or config.feed_forward_bias):
            reasons.append(
                "it has a sliding window, which only Mistral's format can express, "
                "and biases, which that format cannot express"
            )
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
            "head_dim": config.width_of_head,
            "hidden_act": "gelu_pytorch_tanh" if config.activation == "gelu_tanh" else config.activation,
            "rms_norm_eps": config.norm_eps,
            "rope_parameters": rope_parameters_of(config.rotary_base, config.rotary_scaling),
            "tie_word_embeddings": config.tied,
            "attention_dropout": config.attention_dropout_p,
            **special,
            "bos_token_id": None,
            "eos_token_id": list(config.end_tokens) or None,
        }


class Qwen2(Llama):
    """Qwen2's format: Llama's, with biases for queries, keys and values.

    The file has no bias for the output projection; in our model, this bias is set to 0.
    """

    def clean_weights(self, weights: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
        cleaned = super().clean_weights(weights, config)
        for layer in range(config.num_layers):
            cleaned.setdefault(f"model.layers.{layer}.self_attn.o_proj.bias", torch.zeros(config.embed_dim))
        return cleaned


def _window(config: Mapping[str, Any]) -> int | None:
    """Return the size of the sliding window in config.json, or None if tokens attend to all earlier tokens."""
    if config.get("model_type") == "llama" or config.get("use_sliding_window", True) is False:
        return None
    return config.get("sliding_window")
