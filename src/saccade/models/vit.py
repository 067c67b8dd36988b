"""How the Vision Transformer's published folders describe it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from saccade.models.checkpoint_format import ACTIVATIONS, FileFormat
from saccade.models.vision_config import VisionTransformerConfig

__all__ = ["VisionFormat", "ViT"]

# What no hidden state depends on: the pooler, and what stands for patches that are hidden in training.
_NOT_THE_ENCODER = ("pooler.", "embeddings.mask_token", "decoder.")
# Names in files of older and newer versions, and those that transformers holds them by; in this order.
_RENAMED = {
    "encoder.layer.": "layers.",
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}


class VisionFormat(FileFormat):
    """What config.json says of pictures and patches.

    Args:
        weights: of the file: whether there is a head is told by them alone.
    """

    sizes = {
        "hidden_size": "embed_dim",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "intermediate_size": "feed_forward_dim",
        "image_size": "image_size",
        "patch_size": "patch_size",
    }
    activation: str

    def __init__(self, weights: Mapping[str, Tensor]):
        self.weights = weights

    def reasons_to_read(self, config: Mapping[str, Any]) -> list[str]:
        reasons = []
        activation = config.get("hidden_act") or self.activation
        if activation not in ACTIVATIONS:
            reasons.append(f"hidden_act is {activation!r}, not one of {', '.join(ACTIVATIONS)}")
        image, patch = (_pair(config.get(key)) for key in ("image_size", "patch_size"))
        if config.get("patch_size") is not None and len(set(patch)) != 1:
            reasons.append(f"patch_size is {list(patch)}: patches are squares here")
        elif patch and patch[0] > 0 and any(side % patch[0] for side in image):
            reasons.append(
                f"image_size {list(image)} is no multiple of patch_size {patch[0]}: the rest would not be seen"
            )
        return reasons

    def read_config(self, config: Mapping[str, Any]) -> VisionTransformerConfig:
        words = self._required(config)
        words |= {"image_size": _pair(words["image_size"]), "patch_size": _pair(words["patch_size"])[0]}
        words["activation"] = ACTIVATIONS[config.get("hidden_act") or self.activation]
        if config.get("num_channels") is not None:
            words["channels"] = config["num_channels"]
        return VisionTransformerConfig(**words, **self.own_words(config))

    def own_words(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What a family adds to the config."""
        raise NotImplementedError

    def sides(self, config: VisionTransformerConfig) -> tuple[str, ...]:
        return ("embed_dim", "feed_forward_dim", "num_tokens", "patch_len")


class ViT(VisionFormat):
    """Learned positions, norms first, a class token; Dosovitskiy et al. 2021, arXiv:2010.11929."""

    stacks = {"num_layers": ("stack.layers", "layers")}
    activation = "gelu"
    names = {
        "patch": "embeddings.patch_embeddings.projection",
        "class_token": "embeddings.cls_token",
        "position": "embeddings.position_embeddings",
        "stack.final_norm": "layernorm",
        "head": "classifier",
        "attention_norm": "layernorm_before",
        "attention.query_projection": "attention.q_proj",
        "attention.key_projection": "attention.k_proj",
        "attention.value_projection": "attention.v_proj",
        "attention.output_projection": "attention.o_proj",
        "feed_forward_norm": "layernorm_after",
        "feed_forward.expand": "mlp.fc1",
        "feed_forward.contract": "mlp.fc2",
    }

    def reasons_to_read(self, config: Mapping[str, Any]) -> list[str]:
        reasons = super().reasons_to_read(config)
        if config.get("qkv_bias") is False:
            reasons.append("qkv_bias is false, and the output projection has a bias: all or none have one here")
        return reasons

    def own_words(self, config: Mapping[str, Any]) -> dict[str, Any]:
        head = self.weights.get("classifier.weight")
        given = {
            "norm_eps": config.get("layer_norm_eps"),
            "dropout_p": config.get("hidden_dropout_prob"),
            "attention_dropout_p": config.get("attention_probs_dropout_prob"),
        }
        words = {"norm_eps": 1e-12} | {name: value for name, value in given.items() if value is not None}
        return words | {"num_classes": None if head is None or not head.dim() else len(head)}

    def plain(self, weights: Mapping[str, Tensor], config: VisionTransformerConfig) -> dict[str, Tensor]:
        found = {}
        for name, weight in weights.items():
            own = name.removeprefix("vit.")
            for old, new in _RENAMED.items():
                own = own.replace(old, new)
            if own in ("embeddings.cls_token", "embeddings.position_embeddings"):
                # In theirs these are a batch of one.
                found[f"{own}.weight"] = weight[0] if weight.dim() == 3 and len(weight) == 1 else weight
            elif not own.startswith(_NOT_THE_ENCODER):
                found[own] = weight
        return found


def _pair(size: Any) -> tuple[int, ...]:
    """Height and width; one number is both, and None is neither."""
    if size is None:
        return ()
    return tuple(size) if isinstance(size, list | tuple) else (size, size)
