"""saccade's own file formats: for decoders that no published family can express, and for encoder-decoders."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from saccade.masks import sliding_window
from saccade.masks.convert.patterns import window_size
from saccade.models.checkpoint_format import DecoderFormat, FileFormat, reasons_no_format_can_express
from saccade.models.config import DecoderConfig, EncoderDecoderConfig
from saccade.models.rope_config import rope_base, rope_reasons, rope_scaling, rope_words

_CONVERTED = ("mask", "rotary_base", "rotary_scaling", "end_tokens")
_FIELDS = tuple(field.name for field in dataclasses.fields(DecoderConfig) if field.name not in _CONVERTED)
_KEYS = {*_FIELDS, "model_type", "window", "rope_parameters", "end_tokens"}
_PAIR_FIELDS = dataclasses.fields(EncoderDecoderConfig)
_PAIR_NAMES = tuple(field.name for field in _PAIR_FIELDS)


class SaccadeFormat(DecoderFormat):
    """saccade's own file format for decoders: the fields of `DecoderConfig` and our weight names."""

    names = {"embedding": "embedding"}
    prefix = ""
    ignored = ()

    def reasons_to_read(self, config: Mapping[str, Any]) -> list[str]:
        return _unknown_keys(config, _KEYS) + rope_reasons(config)

    def read_config(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> DecoderConfig:
        window = config.get("window")
        fields = {name: config[name] for name in _FIELDS if name in config}
        is_rotary = fields.get("position_encoding", "rotary") == "rotary"
        lengths = {"max_position_embeddings": fields.get("max_len")}
        return DecoderConfig(
            **fields,
            mask=None if window is None else sliding_window(window),
            rotary_base=rope_base(config),
            rotary_scaling=rope_scaling({**lengths, **config}) if is_rotary else None,
            end_tokens=tuple(config.get("end_tokens", ())),
        )

    def reasons_to_write(self, config: DecoderConfig) -> list[str]:
        return reasons_no_format_can_express(config)

    def write_config(self, config: DecoderConfig) -> dict[str, Any]:
        return {
            "model_type": "saccade-decoder",
            **{name: getattr(config, name) for name in _FIELDS},
            "window": window_size(config.causal_mask),
            "rope_parameters": rope_words(config.rotary_base, config.rotary_scaling),
            "end_tokens": list(config.end_tokens),
        }

    def _published_name(self, our_name: str) -> str:
        return our_name


class EncoderDecoderFormat(FileFormat):
    """saccade's own file format for encoder-decoders: the fields of `EncoderDecoderConfig` and our weight names."""

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


def _unknown_keys(config: Mapping[str, Any], known: set[str]) -> list[str]:
    unknown = [key for key in config if key not in known]
    return [f"it has {', '.join(unknown)}, which this version does not know"] if unknown else []
