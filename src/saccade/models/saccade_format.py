"""A format of our own, for decoders that no published family can express."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from saccade.masks import sliding_window
from saccade.models.checkpoint_format import DecoderFormat, reasons_without_words, window_of
from saccade.models.config import DecoderConfig
from saccade.models.rope_config import rope_base, rope_reasons, rope_scaling, rope_words

__all__ = ["SaccadeFormat"]

_ELSEWHERE = ("mask", "rotary_base", "rotary_scaling", "end_tokens")
_FIELDS = tuple(field.name for field in dataclasses.fields(DecoderConfig) if field.name not in _ELSEWHERE)
_KEYS = {*_FIELDS, "model_type", "window", "rope_parameters", "end_tokens"}


class SaccadeFormat(DecoderFormat):
    """The fields of `DecoderConfig` and the names of its weights, as they are."""

    names = {"embedding": "embedding"}
    prefix = ""
    ignored = ()

    def reasons_to_read(self, config: Mapping[str, Any]) -> list[str]:
        unknown = [key for key in config if key not in _KEYS]
        reasons = [f"it has {', '.join(unknown)}, which this version does not know"] if unknown else []
        return reasons + rope_reasons(config)

    def read_config(self, config: Mapping[str, Any]) -> DecoderConfig:
        window = config.get("window")
        given = {name: config[name] for name in _FIELDS if name in config}
        is_rotary = given.get("position_encoding", "rotary") == "rotary"
        lengths = {"max_position_embeddings": given.get("max_len")}
        return DecoderConfig(
            **given,
            mask=None if window is None else sliding_window(window),
            rotary_base=rope_base(config),
            rotary_scaling=rope_scaling({**lengths, **config}) if is_rotary else None,
            end_tokens=tuple(config.get("end_tokens", ())),
        )

    def reasons_to_write(self, config: DecoderConfig) -> list[str]:
        return reasons_without_words(config)

    def write_config(self, config: DecoderConfig) -> dict[str, Any]:
        return {
            "model_type": "saccade-decoder",
            **{name: getattr(config, name) for name in _FIELDS},
            "window": window_of(config),
            "rope_parameters": rope_words(config.rotary_base, config.rotary_scaling),
            "end_tokens": list(config.end_tokens),
        }

    def _their_name(self, own: str) -> str:
        return own
