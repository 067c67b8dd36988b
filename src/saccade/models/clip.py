"""The formats of CLIP's published folders: one for the image encoder, one for the text encoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from saccade.models.checkpoint_format import ACTIVATIONS, FileFormat, end_tokens_of
from saccade.models.config import DecoderConfig, VisionTransformerConfig
from saccade.models.vit import VisionFormat

DEFAULTS: dict[str, dict[str, Any]] = {
    "vision_config": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_channels": 3,
        "image_size": 224,
        "patch_size": 32,
    },
    "text_config": {
        "vocab_size": 49408,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "max_position_embeddings": 77,
        "eos_token_id": 49407,
    },
}
"""Values of missing keys: many of CLIP's files name only the values that differ from these."""
_LAYER = {
    "attention_norm": "layer_norm1",
    "attention.query_projection": "self_attn.q_proj",
    "attention.key_projection": "self_attn.k_proj",
    "attention.value_projection": "self_attn.v_proj",
    "attention.output_projection": "self_attn.out_proj",
    "feed_forward_norm": "layer_norm2",
    "feed_forward.expand": "mlp.fc1",
    "feed_forward.contract": "mlp.fc2",
}
_STACKS = {"num_layers": ("stack.layers", "encoder.layers")}


class ClipVision(VisionFormat):
    """A Vision Transformer with a norm before its first layer; Radford et al. 2021, arXiv:2103.00020."""

    stacks = _STACKS
    activation = "quick_gelu"
    names = {
        **_LAYER,
        "patch": "embeddings.patch_embedding",
        "class_token": "embeddings.class_embedding",
        "position": "embeddings.position_embedding",
        "embedding_norm": "pre_layrnorm",
        "stack.final_norm": "post_layernorm",
    }

    def family_fields(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"embedding_norm": True, "patch_bias": False, **_options(config)}

    def clean_weights(self, weights: Mapping[str, Tensor], config: VisionTransformerConfig) -> dict[str, Tensor]:
        cleaned = _without_prefix(weights, "vision_model.")
        token = cleaned.pop("embeddings.class_embedding", None)
        if token is not None:  # the file has one vector, we have a vocabulary of one
            cleaned["embeddings.class_embedding.weight"] = token[None] if token.dim() == 1 else token
        return cleaned


class ClipText(FileFormat):
    """A decoder with learned positions that is used as an encoder; Radford et al. 2021, arXiv:2103.00020."""

    stacks = _STACKS
    activation = "quick_gelu"
    names = {
        **_LAYER,
        "embedding": "embeddings.token_embedding",
        "position": "embeddings.position_embedding",
        "stack.final_norm": "final_layer_norm",
    }

    def reasons_to_read(self, config: Mapping[str, Any]) -> list[str]:
        return self._activation_reasons(config)

    def read_config(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> DecoderConfig:
        ends = end_tokens_of(config)
        return DecoderConfig(
            **self._required(config),
            position_encoding="learned",
            activation=ACTIVATIONS[self._activation(config)],
            gated=False,
            norm="layer",
            attention_bias=True,
            feed_forward_bias=True,
            # The first configs say 2 whatever the end token is; there it is the last of the vocabulary.
            end_tokens=() if ends == (2,) else ends,
            **_options(config),
        )

    def sides(self, config: DecoderConfig) -> tuple[str, ...]:
        return ("vocab_size", "max_len", "embed_dim", "feed_forward_dim")

    def clean_weights(self, weights: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
        return _without_prefix(weights, "text_model.")


def _options(config: Mapping[str, Any]) -> dict[str, Any]:
    options = {"norm_eps": config.get("layer_norm_eps"), "attention_dropout_p": config.get("attention_dropout")}
    return {"norm_eps": 1e-5} | {name: value for name, value in options.items() if value is not None}


def _without_prefix(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Remove the prefix from all names, and drop the table of 0, 1, 2, ..."""
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if not name.endswith("position_ids")}
