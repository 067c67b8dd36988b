"""The format of DETR's published folders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from saccade.models.checkpoint_format import ACTIVATIONS, FileFormat
from saccade.models.config import SetDecoderConfig

_SHARED = {"encoder_attention_heads": "decoder_attention_heads", "encoder_ffn_dim": "decoder_ffn_dim"}


class Detr(FileFormat):
    """Sinusoids of two axes, added to queries and keys; norms after each sum; Carion et al. 2020, arXiv:2005.12872."""

    activation_key, activation = "activation_function", "relu"

    sizes = {
        "d_model": "embed_dim",
        "num_queries": "num_queries",
        "encoder_attention_heads": "num_heads",
        "encoder_layers": "num_encoder_layers",
        "decoder_layers": "num_decoder_layers",
        "encoder_ffn_dim": "feed_forward_dim",
    }
    stacks = {
        "num_encoder_layers": ("encoder", "encoder.layers"),
        "num_decoder_layers": ("decoder", "decoder.layers"),
    }
    names = {
        "input_projection": "input_projection",
        "query": "query_position_embeddings",
        "decoder_norm": "decoder.layernorm",
        "class_head": "class_labels_classifier",
        **{f"box_head.{2 * number}": f"bbox_predictor.layers.{number}" for number in range(3)},
        **{
            f"{ours}.{part}_projection": f"{theirs}.{part[0]}_proj"
            for ours, theirs in (("attention", "self_attn"), ("cross_attention", "encoder_attn"))
            for part in ("query", "key", "value", "output")
        },
        "attention_norm": "self_attn_layer_norm",
        "cross_attention_norm": "encoder_attn_layer_norm",
        "feed_forward.expand": "mlp.fc1",
        "feed_forward.contract": "mlp.fc2",
        "feed_forward_norm": "final_layer_norm",
    }

    def reasons_to_read(self, config: Mapping[str, Any]) -> list[str]:
        reasons = []
        positions = config.get("position_embedding_type") or "sine"
        if positions != "sine":
            reasons.append(f"position_embedding_type is {positions!r}, not 'sine'")
        reasons += self._activation_reasons(config)
        for one, other in _SHARED.items():
            if config.get(one) != config.get(other):
                reasons.append(f"{one} is {config.get(one)} and {other} {config.get(other)}: both are one number here")
        if config.get("activation_dropout"):
            reasons.append("activation_dropout is not 0: inner channels are not dropped here")
        if config.get("auxiliary_loss"):
            reasons.append(
                "auxiliary_loss is true: what goes from layer to layer would be normed, which we do not compute"
            )
        return reasons

    def read_config(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> SetDecoderConfig:
        dropouts = {"dropout_p": config.get("dropout"), "attention_dropout_p": config.get("attention_dropout")}
        return SetDecoderConfig(
            **self._required(config),
            channels=max(1, _side(weights, "input_projection.weight", 1)),
            num_classes=max(1, _side(weights, "class_labels_classifier.weight", 0) - 1),
            activation=ACTIVATIONS[self._activation(config)],
            **{name: value for name, value in dropouts.items() if value is not None},
        )

    def sides(self, config: SetDecoderConfig) -> tuple[str, ...]:
        return ("embed_dim", "num_queries", "feed_forward_dim")

    def clean_weights(self, weights: Mapping[str, Tensor], config: SetDecoderConfig) -> dict[str, Tensor]:
        """Return all weights but the backbone's, under the names that transformers uses."""
        renamed = {name.removeprefix("model."): weight for name, weight in weights.items()}
        return {
            re.sub(r"\.(fc[12])\.", r".mlp.\1.", name.replace("out_proj", "o_proj")).replace("mlp.mlp", "mlp"): weight
            for name, weight in renamed.items()
            if not name.startswith("backbone.")
        }


def _side(weights: Mapping[str, Tensor], name: str, axis: int) -> int:
    """Return the length of a weight's side; 1 if there is no such weight, which is reported later."""
    weight = weights.get(name, weights.get(f"model.{name}"))
    return weight.shape[axis] if weight is not None and weight.dim() > axis else 1
