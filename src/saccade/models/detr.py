"""How DETR's published folders describe it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from saccade.models.checkpoint_format import ACTIVATIONS, FileFormat
from saccade.models.vision_config import SetDecoderConfig

__all__ = ["Detr"]

_SHARED = {"encoder_attention_heads": "decoder_attention_heads", "encoder_ffn_dim": "decoder_ffn_dim"}


class Detr(FileFormat):
    """Waves of two axes, added to queries and keys; norms after each sum; Carion et al. 2020, arXiv:2005.12872.

    Args:
        weights: of the file: how many classes and channels there are is told by them.
    """

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

    def __init__(self, weights: Mapping[str, Tensor]):
        self.weights = weights

    def reasons_to_read(self, config: Mapping[str, Any]) -> list[str]:
        reasons = []
        places = config.get("position_embedding_type") or "sine"
        if places != "sine":
            reasons.append(f"position_embedding_type is {places!r}, not 'sine'")
        activation = config.get("activation_function") or "relu"
        if activation not in ACTIVATIONS:
            reasons.append(f"activation_function is {activation!r}, not one of {', '.join(ACTIVATIONS)}")
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

    def read_config(self, config: Mapping[str, Any]) -> SetDecoderConfig:
        dropouts = {"dropout_p": config.get("dropout"), "attention_dropout_p": config.get("attention_dropout")}
        return SetDecoderConfig(
            **self._required(config),
            channels=self._side("input_projection.weight", 1),
            num_classes=self._side("class_labels_classifier.weight", 0, 1),
            activation=ACTIVATIONS[config.get("activation_function") or "relu"],
            **{name: value for name, value in dropouts.items() if value is not None},
        )

    def sides(self, config: SetDecoderConfig) -> tuple[str, ...]:
        return ("embed_dim", "num_queries", "feed_forward_dim")

    def plain(self, weights: Mapping[str, Tensor], config: SetDecoderConfig) -> dict[str, Tensor]:
        """Keep what is no backbone's, under the names that transformers holds it by."""
        found = {name.removeprefix("model."): weight for name, weight in weights.items()}
        return {
            re.sub(r"\.(fc[12])\.", r".mlp.\1.", name.replace("out_proj", "o_proj")).replace("mlp.mlp", "mlp"): weight
            for name, weight in found.items()
            if not name.startswith("backbone.")
        }

    def _side(self, name: str, axis: int, less: int = 0) -> int:
        """How long a weight's side is; 1 where there is no such weight, which is told later."""
        weight = self.weights.get(name, self.weights.get(f"model.{name}"))
        return max(1, weight.shape[axis] - less) if isinstance(weight, Tensor) and weight.dim() > axis else 1
