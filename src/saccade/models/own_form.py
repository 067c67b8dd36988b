"""A form of our own, for decoders that no one else's has words for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from saccade.masks import sliding_window
from saccade.models.decoder_config import DecoderConfig
from saccade.models.form import Form
from saccade.models.rope import rope_base, rope_reasons, rope_scaling, rope_words
from saccade.models.weights import Entry
from saccade.models.windows import window_of

__all__ = ["OwnForm"]

_ELSEWHERE = ("mask", "rotary_base", "rotary_scaling", "end_tokens")
_NAMES = tuple(field.name for field in dataclasses.fields(DecoderConfig) if field.name not in _ELSEWHERE)
_SPOKEN = {*_NAMES, "model_type", "window", "rope_parameters", "end_tokens"}


class OwnForm(Form):
    """The fields of `DecoderConfig` and the names of its weights, as they are."""

    def reasons_to_read(self, config: Mapping[str, Any]) -> list[str]:
        unknown = [key for key in config if key not in _SPOKEN]
        reasons = [f"it has {', '.join(unknown)}, which this version does not know"] if unknown else []
        return reasons + rope_reasons(config)

    def read_config(self, where: str, config: Mapping[str, Any]) -> DecoderConfig:
        del where
        window = config.get("window")
        given = {name: config[name] for name in _NAMES if name in config}
        is_rotary = given.get("position_encoding", "rotary") == "rotary"
        return DecoderConfig(
            **given,
            mask=None if window is None else sliding_window(window),
            rotary_base=rope_base(config),
            rotary_scaling=rope_scaling({"max_position_embeddings": given.get("max_len"), **config})
            if is_rotary
            else None,
            end_tokens=tuple(config.get("end_tokens", ())),
        )

    def reasons_to_write(self, config: DecoderConfig) -> list[str]:
        reasons = []
        if config.mask is not None and window_of(config) is None:
            reasons.append(f"its mask is {config.mask}: a file has words for a sliding window only")
        if rope_words(config.rotary_base, config.rotary_scaling) is None:
            reasons.append(f"its rotary_scaling is {config.rotary_scaling}, which a file has no words for")
        return reasons

    def write_config(self, config: DecoderConfig) -> dict[str, Any]:
        return {
            "model_type": "saccade-decoder",
            **{name: getattr(config, name) for name in _NAMES},
            "window": window_of(config),
            "rope_parameters": rope_words(config.rotary_base, config.rotary_scaling),
            "end_tokens": list(config.end_tokens),
        }

    def entries(self, config: DecoderConfig, own: Iterable[str]) -> list[Entry]:
        del config
        return [Entry(name, (name,)) for name in own]
