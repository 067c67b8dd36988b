"""The format of GPT-2's published folders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from saccade.models.checkpoint_format import ACTIVATIONS, DecoderFormat, differences, end_tokens_of
from saccade.models.config import DecoderConfig

_TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


class GPT2(DecoderFormat):
    """Learned positions, layer norms first, one gelu layer, one joined projection; Radford et al. 2019."""

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
            reasons.append("scale_attn_weights is not true: scores are always scaled here")
        reasons += [
            f"{key} is true, which we do not compute"
            for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention")
            if config.get(key)
        ]
        dropouts = {key: config.get(key, 0.1) for key in ("resid_pdrop", "embd_pdrop")}
        if len(set(dropouts.values())) > 1:
            reasons.append(f"{dropouts} differ: embeddings and what is added to them are dropped alike here")
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
        ours |= {"attention_bias": True, "feed_forward_bias": True, "kv_heads": config.num_heads}
        return differences(config, ours)

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
