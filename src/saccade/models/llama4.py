"""The file format of Llama 4's text part, alone or inside a model that also reads images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from saccade.masks import Segments
from saccade.models.checkpoint_format import FileFormat
from saccade.models.decoder_config import DecoderConfig, LayerPattern
from saccade.models.llama_relatives import LlamaRelative
from saccade.models.rope_config import rope_base, rope_scaling
from saccade.models.text_formats import Llama
from saccade.nn.qk_norm import QKNorm
from saccade.positions import QueryTemperature

_PARTS = {"gate": "gate_proj", "expand": "up_proj", "contract": "down_proj"}
_NETWORKS = {"feed_forward": "feed_forward", "feed_forward.shared": "feed_forward.shared_expert"}
_EXPERTS = ".feed_forward.experts."


class Llama4Text(LlamaRelative):
    """Llama 4's text format: chunked attention, layers with a temperature instead of positions, and experts.

    Reference: Meta 2025, the Llama 4 models and their code in transformers.
    """

    sizes = {
        **{key: ours for key, ours in FileFormat.sizes.items() if key != "intermediate_size"},
        "intermediate_size_mlp": "feed_forward_dim",
        "intermediate_size": "expert_dim",
        "num_local_experts": "num_experts",
    }
    names = {
        **{ours: theirs for ours, theirs in Llama.names.items() if not ours.startswith("feed_forward.")},
        **{f"{ours}.{a}": f"{theirs}.{b}" for ours, theirs in _NETWORKS.items() for a, b in _PARTS.items()},
        "feed_forward.router": "feed_forward.router",
    }
    kinds = ("chunked_attention", "full_attention")

    def reasons_to_read(self, config: Mapping[str, Any]) -> list[str]:
        reasons = super().reasons_to_read(config)
        if "chunked_attention" in self._layer_kinds(config) and not config.get("attention_chunk_size"):
            reasons.append("a layer has chunked_attention, but attention_chunk_size is missing")
        if len(self._rotates(config)) < (config.get("num_hidden_layers") or 0):
            reasons.append("no_rope_layers does not name all layers")
        return reasons

    def changes(self, config: Mapping[str, Any]) -> dict[str, Any]:
        eps = config.get("rms_norm_eps", 1e-5)
        norm = QKNorm(eps=eps, learned=False, after_rotary=True)
        return {
            "head_dim": config.get("head_dim", 128),
            "norm_eps": eps,
            "qk_norm": norm if config.get("use_qk_norm", True) else None,
            "rotary_layout": "interleaved",
            "num_chosen_experts": config.get("num_experts_per_tok", 1),
        }

    def clean_weights(self, weights: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
        """Return the checkpoint's weights, with the stacked weights of the experts split into one matrix each."""
        cleaned = dict[str, Tensor]()
        for name, x in super().clean_weights(weights, config).items():
            layer, experts, part = name.partition(_EXPERTS)
            parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(part)
            if not experts or parts is None or x.dim() != 3:
                cleaned[name] = x
                continue
            for part, stacked in zip(parts, x.mT.tensor_split(len(parts), 1), strict=True):
                for number, matrix in enumerate(stacked):
                    cleaned[f"{layer}{_EXPERTS}{number}.{part}.weight"] = matrix
        return cleaned

    def _published_name(self, our_name: str) -> str:
        layer, experts, inner = our_name.partition(_EXPERTS)
        if not experts:
            return super()._published_name(our_name)
        number, part, kind = inner.split(".")
        return f"{layer.replace('stack.layers', 'model.layers')}{_EXPERTS}{number}.{_PARTS[part]}.{kind}"

    def _layer_kinds(self, config: Mapping[str, Any]) -> list[str]:
        if config.get("layer_types") is not None:
            return list(config["layer_types"])
        return ["chunked_attention" if is_rotary else "full_attention" for is_rotary in self._rotates(config)]

    def _rotates(self, config: Mapping[str, Any]) -> list[bool]:
        """Return whether each layer has rotary positions. The key ``no_rope_layers`` is 1 for layers that have them."""
        if config.get("no_rope_layers"):
            return [bool(each) for each in config["no_rope_layers"]]
        every = config.get("no_rope_layer_interval") or 4
        return [(layer + 1) % every != 0 for layer in range(config.get("num_hidden_layers") or 0)]

    def _rope(self, config: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
        return {"rope_theta": 500_000.0, **config}

    def _patterns(self, config: Mapping[str, Any]) -> tuple[LayerPattern, ...]:
        rope, step = self._rope(config, ""), config.get("interleave_moe_layer_step") or 1
        of_experts, temperature = config.get("moe_layers"), None
        if config.get("attn_temperature_tuning", True) and config.get("attn_scale", 0.1):
            temperature = QueryTemperature(config.get("floor_scale", 8192), config.get("attn_scale", 0.1), 1)
        return tuple(
            LayerPattern(
                mask=Segments(config["attention_chunk_size"], 0) if kind == "chunked_attention" else None,
                rotary=is_rotary,
                rotary_base=rope_base(rope),
                rotary_scaling=rope_scaling(rope),
                temperature=None if is_rotary else temperature,
                uses_qk_norm=is_rotary,
                uses_experts=(index + 1) % step == 0 if of_experts is None else index in of_experts,
            )
            for index, (kind, is_rotary) in enumerate(
                zip(self._layer_kinds(config), self._rotates(config), strict=False)
            )
        )


class Llama4(Llama4Text):
    """The format of a whole Llama 4 model. Only its text part is read, not its vision part."""

    def reasons_to_read(self, config: Mapping[str, Any]) -> list[str]:
        inner = config.get("text_config")
        return super().reasons_to_read(inner) if isinstance(inner, Mapping) else ["text_config is missing"]

    def read_config(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> DecoderConfig:
        return super().read_config(config["text_config"], weights)

    def clean_weights(self, weights: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
        prefix = "language_model."
        text = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)}
        return super().clean_weights(text, config)
