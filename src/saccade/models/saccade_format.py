"""saccade's own file formats, for decoders that no published format can express and for encoder-decoders."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from saccade.masks import Causal, Mask, Segments, sliding_window
from saccade.masks.convert.patterns import window_size
from saccade.models.checkpoint_format import DecoderFormat, FileFormat, reasons_no_format_can_express
from saccade.models.config import EncoderDecoderConfig
from saccade.models.decoder_config import DecoderConfig, LayerPattern
from saccade.models.rope_config import rope_base, rope_parameters_of, rope_reasons, rope_scaling
from saccade.nn.qk_norm import QKNorm
from saccade.positions import QueryTemperature

_CONVERTED = ("mask", "rotary_base", "rotary_scaling", "end_tokens", "qk_norm", "layers")
_FIELDS = tuple(field.name for field in dataclasses.fields(DecoderConfig) if field.name not in _CONVERTED)
_KEYS = {*_FIELDS, "model_type", "window", "segment", "rope_parameters", "end_tokens", "qk_norm", "layers"}
_FLAGS = ("rotary", "uses_qk_norm", "uses_experts")
_LAYER_KEYS = {*_FLAGS, "window", "segment", "rope_parameters", "temperature"}
_NORM_KEYS = {field.name for field in dataclasses.fields(QKNorm)}
_TEMPERATURE_KEYS = {field.name for field in dataclasses.fields(QueryTemperature)}
_PAIR_FIELDS = dataclasses.fields(EncoderDecoderConfig)
_PAIR_NAMES = tuple(field.name for field in _PAIR_FIELDS)


class SaccadeFormat(DecoderFormat):
    """saccade's own file format for decoders, with the fields of `DecoderConfig` and our weight names."""

    names = {"embedding": "embedding"}
    prefix = ""
    ignored = ()

    def reasons_to_read(self, config: Mapping[str, Any]) -> list[str]:
        reasons = _unknown_keys(config, _KEYS) + rope_reasons(config)
        norm = config.get("qk_norm")
        if norm is not None and not (isinstance(norm, Mapping) and {*norm} <= _NORM_KEYS):
            reasons.append(f"qk_norm is {norm!r}, not a JSON object of {', '.join(sorted(_NORM_KEYS))}")
        layers = config.get("layers")
        if layers is None:
            return reasons
        if not isinstance(layers, list) or not all(isinstance(x, Mapping) and {*x} <= _LAYER_KEYS for x in layers):
            return [*reasons, f"layers is not a list of JSON objects of {', '.join(sorted(_LAYER_KEYS))}"]
        for temperature in (layer.get("temperature") for layer in layers):
            if temperature is not None and not (
                isinstance(temperature, Mapping) and {*temperature} <= _TEMPERATURE_KEYS
            ):
                keys = ", ".join(sorted(_TEMPERATURE_KEYS))
                reasons.append(f"temperature is {temperature!r}, not a JSON object of {keys}")
        return reasons + [reason for layer in layers for reason in rope_reasons(layer)]

    def read_config(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> DecoderConfig:
        fields = {name: config[name] for name in _FIELDS if name in config}
        is_rotary = fields.get("position_encoding", "rotary") == "rotary"
        lengths = {"max_position_embeddings": fields.get("max_len")}
        norm, layers = config.get("qk_norm"), config.get("layers")
        if isinstance(fields.get("kv_layers"), list):
            fields["kv_layers"] = tuple(fields["kv_layers"])
        return DecoderConfig(
            **fields,
            qk_norm=None if norm is None else QKNorm(**norm),
            layers=None if layers is None else tuple(_read_layer({**lengths, **layer}) for layer in layers),
            mask=_read_mask(config),
            rotary_base=rope_base(config),
            rotary_scaling=rope_scaling({**lengths, **config}) if is_rotary else None,
            end_tokens=tuple(config.get("end_tokens", ())),
        )

    def reasons_to_write(self, config: DecoderConfig) -> list[str]:
        return reasons_no_format_can_express(config, segment_of)

    def write_config(self, config: DecoderConfig) -> dict[str, Any]:
        return {
            "model_type": "saccade-decoder",
            **{name: getattr(config, name) for name in _FIELDS},
            **_mask_json(config.mask),
            "rope_parameters": rope_parameters_of(config.rotary_base, config.rotary_scaling),
            "qk_norm": None if config.qk_norm is None else dataclasses.asdict(config.qk_norm),
            "layers": None if config.layers is None else [_layer_json(pattern) for pattern in config.layers],
            "end_tokens": list(config.end_tokens),
        }

    def _published_name(self, our_name: str) -> str:
        return our_name


class EncoderDecoderFormat(FileFormat):
    """saccade's file format for encoder-decoders, with the fields of `EncoderDecoderConfig` and our weight names."""

    sizes = {field.name: field.name for field in _PAIR_FIELDS if field.default is dataclasses.MISSING}
    stacks = {
        "num_encoder_layers": ("encoder.layers", "encoder.layers"),
        "num_decoder_layers": ("decoder.layers", "decoder.layers"),
    }
    names = {}

    def reasons_to_read(self, config: Mapping[str, Any]) -> list[str]:
        return _unknown_keys(config, {*_PAIR_NAMES, "model_type"})

    def read_config(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> EncoderDecoderConfig:
        self._required(config)
        fields = {name: config[name] for name in _PAIR_NAMES if name in config}
        return EncoderDecoderConfig(**fields | {"end_tokens": tuple(fields.get("end_tokens", ()))})

    def write_config(self, config: EncoderDecoderConfig) -> dict[str, Any]:
        fields = dataclasses.asdict(config)
        return {"model_type": "saccade-encoder-decoder", **fields, "end_tokens": list(config.end_tokens)}

    def sides(self, config: EncoderDecoderConfig) -> tuple[str, ...]:
        learned = ("max_len",) if config.position_encoding == "learned" else ()
        return ("vocab_size", "embed_dim", "feed_forward_dim", *learned)

    def clean_weights(self, weights: Mapping[str, Tensor], config: EncoderDecoderConfig) -> dict[str, Tensor]:
        return dict(weights)

    def _published_name(self, our_name: str) -> str:
        return our_name


def _layer_json(pattern: LayerPattern) -> dict[str, Any]:
    """Return a layer's mask and positions as a JSON object."""
    rope = rope_parameters_of(pattern.rotary_base, pattern.rotary_scaling)
    temperature = None if pattern.temperature is None else dataclasses.asdict(pattern.temperature)
    flags = {name: getattr(pattern, name) for name in _FLAGS}
    return {**_mask_json(pattern.mask), **flags, "rope_parameters": rope, "temperature": temperature}


def _read_layer(layer: Mapping[str, Any]) -> LayerPattern:
    """Read a layer's mask and positions from a JSON object that `_layer_json` returned."""
    temperature = layer.get("temperature")
    return LayerPattern(
        mask=_read_mask(layer),
        **{name: layer.get(name, True) for name in _FLAGS},
        rotary_base=rope_base(layer),
        rotary_scaling=rope_scaling(layer),
        temperature=None if temperature is None else QueryTemperature(**temperature),
    )


def _mask_json(mask: Mask | None) -> dict[str, Any]:
    """Return the JSON keys of a decoder's mask: a sliding window, segments or neither."""
    return {"window": None if mask is None else window_size(Causal() & mask), "segment": segment_of(mask)}


def _read_mask(config: Mapping[str, Any]) -> Mask | None:
    """Read a mask from the JSON keys that `_mask_json` returned."""
    window, segment = config.get("window"), config.get("segment")
    if segment is not None:
        return Segments(segment, 0)
    return None if window is None else sliding_window(window)


def segment_of(mask: Mask | None) -> int | None:
    """Return n if the mask is ``Segments(n, 0)``, and None otherwise."""
    return mask.segment if isinstance(mask, Segments) and not mask.memory else None


def _unknown_keys(config: Mapping[str, Any], known: set[str]) -> list[str]:
    unknown = [key for key in config if key not in known]
    return [f"it has {', '.join(unknown)}, which this version does not support"] if unknown else []
