"""The file formats of published vision models: ViT, CLIP (both encoders) and DETR."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from saccade.models.checkpoint_format import ACTIVATIONS, FileFormat, end_tokens_of
from saccade.models.config import SetDecoderConfig, VisionTransformerConfig
from saccade.models.decoder_config import DecoderConfig

# No hidden state depends on the pooler, the decoder or the token for patches that are masked in training.
_UNUSED_WEIGHTS = ("pooler.", "embeddings.mask_token", "decoder.")
# Old names of weights, and the names that newer files and transformers use; replaced in this order.
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
    """The base class of file formats for vision models with image and patch sizes in config.json."""

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
            reasons.append(f"patch_size is {list(patch)}: saccade needs square patches")
        elif patch and patch[0] > 0 and any(side % patch[0] for side in image):
            reasons.append(
                f"image_size {list(image)} is not a multiple of patch_size {patch[0]}: "
                "the rest of the image would be ignored"
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
        """Return the fields of our config that are specific to this family of vision models."""

    def sides(self, config: VisionTransformerConfig) -> tuple[str, ...]:
        return ("embed_dim", "feed_forward_dim", "num_tokens", "patch_len")


class ViT(VisionFormat):
    """ViT's format: learned positions, pre-norm layers and a class token; Dosovitskiy et al. 2021, arXiv:2010.11929."""

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
            reasons.append(
                "qkv_bias is false, and the output projection has a bias: in "
                "saccade, all projections have one or none has"
            )
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
                # In the file, these tensors are a batch of one.
                cleaned[f"{name}.weight"] = weight[0] if weight.dim() == 3 and len(weight) == 1 else weight
            elif not name.startswith(_UNUSED_WEIGHTS):
                cleaned[name] = weight
        return cleaned


def _pair(size: Any) -> tuple[int, ...]:
    """Return the height and width of images or patches; a single number in config.json stands for both.

    If the size is None, return an empty tuple.
    """
    if size is None:
        return ()
    return tuple(size) if isinstance(size, list | tuple) else (size, size)


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
"""Default values: many of CLIP's config files contain only the values that differ from these."""
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
    """CLIP's image encoder: a Vision Transformer with a norm before its first layer; see arXiv:2103.00020."""

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
        if token is not None:  # the file has one vector; ours is an embedding with one entry
            cleaned["embeddings.class_embedding.weight"] = token[None] if token.dim() == 1 else token
        return cleaned


class ClipText(FileFormat):
    """CLIP's text encoder: a decoder with learned positions; Radford et al. 2021, arXiv:2103.00020."""

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
            # Early configs always give 2, but the end token is actually the last token of the vocabulary.
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
    """Remove the prefix from the names of CLIP's weights, and drop the constant position indices 0, 1, 2, ..."""
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if not name.endswith("position_ids")}


_SHARED = {"encoder_attention_heads": "decoder_attention_heads", "encoder_ffn_dim": "decoder_ffn_dim"}


class Detr(FileFormat):
    """DETR's format: sinusoids in queries and keys, and post-norm layers; Carion et al. 2020, arXiv:2005.12872."""

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
                reasons.append(
                    f"{one} is {config.get(one)} and {other} {config.get(other)}, but saccade needs one number for both"
                )
        if config.get("activation_dropout"):
            reasons.append(
                "activation_dropout is not 0: saccade does not drop the inner channels of feed-forward layers"
            )
        if config.get("auxiliary_loss"):
            reasons.append(
                "auxiliary_loss is true: hidden states would be normed between layers, which saccade does not support"
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
        """Return DETR's weights except those of the backbone, under the names that transformers uses."""
        renamed = {name.removeprefix("model."): weight for name, weight in weights.items()}
        return {
            re.sub(r"\.(fc[12])\.", r".mlp.\1.", name.replace("out_proj", "o_proj")).replace("mlp.mlp", "mlp"): weight
            for name, weight in renamed.items()
            if not name.startswith("backbone.")
        }


def _side(weights: Mapping[str, Tensor], name: str, axis: int) -> int:
    """Return the size of one dimension of a weight in DETR's file.

    If the weight is missing, return 1; the missing weight is reported later.
    """
    weight = weights.get(name, weights.get(f"model.{name}"))
    return weight.shape[axis] if weight is not None and weight.dim() > axis else 1
