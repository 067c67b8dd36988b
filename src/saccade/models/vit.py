"""The format of the Vision Transformer's published folders."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from saccade.models.checkpoint_format import ACTIVATIONS, FileFormat
from saccade.models.config import VisionTransformerConfig

# No hidden state depends on the pooler, the decoder or the token for patches that are hidden in training.
_UNUSED_WEIGHTS = ("pooler.", "embeddings.mask_token", "decoder.")
# Names in older and newer files, and the names that transformers uses; replaced in this order.
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
    """A format whose config.json has sizes of images and patches."""

    sizes = {
        "hidden_size": "embed_dim",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "intermediate_size": "feed_forward_dim",
        "image_size": "image_size",
        "patch_size": "patch_size",
    }

    def reasons_to_read(self, config: Mapping[str, Any]) -> list[str]:
        reasons = self._activation_reasons(config)
        image, patch = (_pair(config.get(key)) for key in ("image_size", "patch_size"))
        if config.get("patch_size") is not None and len(set(patch)) != 1:
            reasons.append(f"patch_size is {list(patch)}: patches are squares here")
        elif patch and patch[0] > 0 and any(side % patch[0] for side in image):
            reasons.append(
                f"image_size {list(image)} is no multiple of patch_size {patch[0]}: the rest would not be seen"
            )
        return reasons

    def read_config(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> VisionTransformerConfig:
        fields = self._required(config)
        fields |= {"image_size": _pair(fields["image_size"]), "patch_size": _pair(fields["patch_size"])[0]}
        fields["activation"] = ACTIVATIONS[self._activation(config)]
        if config.get("num_channels") is not None:
            fields["channels"] = config["num_channels"]
        return VisionTransformerConfig(**fields, **self.family_fields(config, weights))

    @abstractmethod
    def family_fields(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the fields of our config that only this family has."""

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

    def family_fields(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Any]:
        head = weights.get("classifier.weight")
        options = {
            "norm_eps": config.get("layer_norm_eps"),
            "dropout_p": config.get("hidden_dropout_prob"),
            "attention_dropout_p": config.get("attention_probs_dropout_prob"),
        }
        fields = {"norm_eps": 1e-12} | {name: value for name, value in options.items() if value is not None}
        return fields | {"num_classes": None if head is None or not head.dim() else len(head)}

    def clean_weights(self, weights: Mapping[str, Tensor], config: VisionTransformerConfig) -> dict[str, Tensor]:
        cleaned = {}
        for key, weight in weights.items():
            name = key.removeprefix("vit.")
            for old, new in _RENAMED.items():
                name = name.replace(old, new)
            if name in ("embeddings.cls_token", "embeddings.position_embeddings"):
                # In the file these are a batch of one.
                cleaned[f"{name}.weight"] = weight[0] if weight.dim() == 3 and len(weight) == 1 else weight
            elif not name.startswith(_UNUSED_WEIGHTS):
                cleaned[name] = weight
        return cleaned


def _pair(size: Any) -> tuple[int, ...]:
    """Return height and width: one number means both; None gives an empty tuple."""
    if size is None:
        return ()
    return tuple(size) if isinstance(size, list | tuple) else (size, size)
