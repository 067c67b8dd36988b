"""File formats of models whose layers are variants of Llama's: Qwen3, OLMo 2, Gemma 2 and 3, and Cohere 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from saccade.masks import sliding_window
from saccade.models.checkpoint_format import ACTIVATIONS, end_tokens_of
from saccade.models.decoder_config import DecoderConfig, LayerPattern
from saccade.models.rope_config import rope_base, rope_reasons, rope_scaling
from saccade.models.text_formats import Llama
from saccade.nn.qk_norm import QKNorm

_ATTENTION_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}


class LlamaRelative(Llama):
    """The format of a model family that differs from Llama in some options of `DecoderConfig`.

    Attributes:
        full_every: n if every n-th layer has no window, unless config.json lists the kinds of layers; None if other
            keys of config.json determine the windows.
        rotates_full_layers: whether the layers without a window rotate queries and keys.
        kinds: the kinds of layers that ``layer_types`` in config.json may name.
    """

    full_every: ClassVar[int | None] = None
    rotates_full_layers: ClassVar[bool] = True
    kinds: ClassVar[tuple[str, str]] = ("sliding_attention", "full_attention")

    def reasons_to_read(self, config: Mapping[str, Any]) -> list[str]:
        reasons = self._activation_reasons(config)
        kinds = self._layer_kinds(config)
        unknown = sorted(set(kinds) - {*self.kinds})
        if unknown:
            reasons.append(f"layer_types names {', '.join(unknown)}, not only {' and '.join(self.kinds)}")
        if len(kinds) != (config.get("num_hidden_layers") or 0):
            reasons.append(f"layer_types names {len(kinds)} layers, but num_hidden_layers is not {len(kinds)}")
        for kind in dict.fromkeys(kinds):
            reasons += [reason for reason in rope_reasons(self._rope(config, kind)) if reason not in reasons]
        if config.get("use_bidirectional_attention"):
            reasons.append("use_bidirectional_attention is true: this is not a decoder")
        if "sliding_attention" in kinds and not config.get("sliding_window"):
            reasons.append("layer_types names sliding_attention, but sliding_window is missing")
        return reasons

    def read_config(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> DecoderConfig:
        options = {
            "num_kv_heads": config.get("num_key_value_heads"),
            "head_dim": config.get("head_dim"),
            "activation": ACTIVATIONS[self._activation(config)],
            "norm_eps": config.get("rms_norm_eps", 1e-6),
            "attention_bias": config.get("attention_bias", False),
            "tied": config.get("tie_word_embeddings", False),
            "attention_dropout_p": config.get("attention_dropout") or 0.0,
            "end_tokens": end_tokens_of(config),
        }
        patterns = self._patterns(config)
        if len(set(patterns)) == 1 and patterns[0].rotary:
            pattern = patterns[0]
            options |= {name: getattr(pattern, name) for name in ("mask", "rotary_base", "rotary_scaling")}
        else:
            options["layers"] = patterns
        return DecoderConfig(**self._required(config) | options | self.changes(config))

    def changes(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of `DecoderConfig` that this family sets differently from Llama."""
        return {}

    def _layer_kinds(self, config: Mapping[str, Any]) -> list[str]:
        """Return the kind of each layer, with the names that ``layer_types`` in config.json uses."""
        count, window = config.get("num_hidden_layers") or 0, config.get("sliding_window")
        if config.get("layer_types") is not None:
            return list(config["layer_types"])
        if self.full_every is None:
            first = config.get("max_window_layers", 0) if config.get("use_sliding_window", False) and window else count
            return ["sliding_attention" if layer >= first else "full_attention" for layer in range(count)]
        every = config.get("sliding_window_pattern") or self.full_every
        return ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(count)]

    def _rope(self, config: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
        """Return the contents of config.json with the rotary settings of one kind of layer."""
        return config

    def _patterns(self, config: Mapping[str, Any]) -> tuple[LayerPattern, ...]:
        return tuple(self._pattern(config, kind) for kind in self._layer_kinds(config))

    def _pattern(self, config: Mapping[str, Any], kind: str) -> LayerPattern:
        is_full, rope = kind == "full_attention", self._rope(config, kind)
        return LayerPattern(
            mask=None if is_full else sliding_window(config["sliding_window"]),
            rotary=self.rotates_full_layers or not is_full,
            rotary_base=rope_base(rope),
            rotary_scaling=rope_scaling(rope),
        )


class Qwen3(LlamaRelative):
    """Qwen3's format, with heads of any width and norms of queries and keys; Yang et al. 2025, arXiv:2505.09388."""

    names = {**Llama.names, **_ATTENTION_NORMS}

    def changes(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"head_dim": config.get("head_dim", 128), "qk_norm": QKNorm(eps=config.get("rms_norm_eps", 1e-6))}


class Olmo2(LlamaRelative):
    """OLMo 2's format: norms follow attention and feed-forward network, and norms of queries and keys span all heads.

    Reference: Team OLMo 2025, arXiv:2501.00656.
    """

    names = {
        **Llama.names,
        **_ATTENTION_NORMS,
        "attention_norm": "post_attention_layernorm",
        "feed_forward_norm": "post_feedforward_layernorm",
    }

    def changes(self, config: Mapping[str, Any]) -> dict[str, Any]:
        eps = config.get("rms_norm_eps", 1e-5)
        return {"norm_first": False, "part_norm": True, "norm_eps": eps, "qk_norm": QKNorm("all_heads", eps)}


class Gemma2(LlamaRelative):
    """Gemma 2's format: norms before and after attention and feed-forward network, and a window in every other layer.

    The file stores 1 less than each weight of a norm.

    Reference: Gemma Team 2024, arXiv:2408.00118.
    """

    names = {
        **Llama.names,
        "attention_part_norm": "post_attention_layernorm",
        "feed_forward_norm": "pre_feedforward_layernorm",
        "feed_forward_part_norm": "post_feedforward_layernorm",
    }
    activation_key, activation = "hidden_activation", "gelu_pytorch_tanh"
    full_every = 2
    caps: ClassVar[tuple[float | None, float | None]] = (50.0, 30.0)

    def changes(self, config: Mapping[str, Any]) -> dict[str, Any]:
        softcap, logit_softcap = self.caps
        return {
            "part_norm": True,
            "head_dim": config.get("head_dim", 256),
            "attention_scale": config.get("query_pre_attn_scalar", 256) ** -0.5,
            "softcap": config.get("attn_logit_softcapping", softcap),
            "logit_softcap": config.get("final_logit_softcapping", logit_softcap),
            "embedding_scale": config["hidden_size"] ** 0.5,
            "tied": config.get("tie_word_embeddings", True),
        }

    def clean_weights(self, weights: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
        cleaned = super().clean_weights(weights, config)
        return {name: 1.0 + x.float() if name.endswith("norm.weight") else x for name, x in cleaned.items()}


class Gemma3(Gemma2):
    """Gemma 3's format: Gemma 2's, plus norms of queries and keys and a separate rotary base for layers with a window.

    Reference: Gemma Team 2025, arXiv:2503.19786.
    """

    names = {**Gemma2.names, **_ATTENTION_NORMS}
    full_every = 6
    caps = (None, None)

    def changes(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return super().changes(config) | {"qk_norm": QKNorm(eps=config.get("rms_norm_eps", 1e-6))}

    def _rope(self, config: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
        settings = config.get("rope_parameters") or {}
        if not isinstance(settings, Mapping):
            return config
        if kind in settings:
            return {**config, "rope_parameters": settings[kind]}
        if kind == "sliding_attention":  # in older files, scaling applies only to layers without a window
            return {"rope_theta": config.get("rope_local_base_freq", 10_000.0)}
        return {**config, "rope_theta": config.get("rope_theta", 1_000_000.0)}


class Cohere2(LlamaRelative):
    """Cohere 2's format: attention parallel to the feed-forward network, and no rotation in layers without a window.

    Reference: Team Cohere 2025, arXiv:2504.00698.
    """

    names = {name: theirs for name, theirs in Llama.names.items() if name != "feed_forward_norm"}
    full_every = 4
    rotates_full_layers = False

    def changes(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "norm": "layer_without_bias",
            "norm_eps": config.get("layer_norm_eps", 1e-5),
            "parallel": True,
            "rotary_layout": "interleaved",
            "logit_scale": config.get("logit_scale", 0.0625),
            "tied": config.get("tie_word_embeddings", True),
        }
