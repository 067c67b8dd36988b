"""A format of our own for encoder-decoders: the fields of the config and the names of the weights, as they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from saccade.models.checkpoint_format import FileFormat
from saccade.models.config import EncoderDecoderConfig

__all__ = ["PairFormat"]

_FIELDS = dataclasses.fields(EncoderDecoderConfig)
_NAMES = [field.name for field in _FIELDS]


class PairFormat(FileFormat):
    """The fields of `EncoderDecoderConfig`, under their own names."""

    sizes = {field.name: field.name for field in _FIELDS if field.default is dataclasses.MISSING}
    stacks = {
        "num_encoder_layers": ("encoder.layers", "encoder.layers"),
        "num_decoder_layers": ("decoder.layers", "decoder.layers"),
    }
    names = {}
    model_type = "saccade-encoder-decoder"

    def reasons_to_read(self, config: Mapping[str, Any]) -> list[str]:
        kind = config.get("model_type")
        reasons = [] if kind == self.model_type else [f"model_type is {kind!r}, not {self.model_type!r}"]
        unknown = [key for key in config if key not in _NAMES and key != "model_type"]
        return reasons + ([f"it has {', '.join(unknown)}, which this version does not know"] if unknown else [])

    def read_config(self, config: Mapping[str, Any]) -> EncoderDecoderConfig:
        self._required(config)
        given = {name: config[name] for name in _NAMES if name in config}
        return EncoderDecoderConfig(**given | {"end_tokens": tuple(given.get("end_tokens", ()))})

    def write_config(self, config: EncoderDecoderConfig) -> dict[str, Any]:
        """The config.json of a model."""
        return {"model_type": self.model_type, **dataclasses.asdict(config), "end_tokens": list(config.end_tokens)}

    def sides(self, config: EncoderDecoderConfig) -> tuple[str, ...]:
        learned = ("max_len",) if config.position_encoding == "learned" else ()
        return ("vocab_size", "embed_dim", "feed_forward_dim", *learned)

    def plain(self, weights: Mapping[str, Tensor], config: EncoderDecoderConfig) -> dict[str, Tensor]:
        return dict(weights)

    def _their_name(self, own: str) -> str:
        return own
