"""A decoder's folder: read in every format that we know, written in the one that most others read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor, nn

from saccade.errors import unsupported
from saccade.models.config_json import check_types
from saccade.models.decoder_config import DecoderConfig
from saccade.models.file_format import DecoderFormat
from saccade.models.folder import read_config, write_folder
from saccade.models.gpt2 import GPT2
from saccade.models.llama import Llama, Qwen2
from saccade.models.loading import load
from saccade.models.saccade_format import SaccadeFormat
from saccade.models.weights import their_weights

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["read_decoder", "write_decoder"]

M = TypeVar("M", bound=nn.Module)
_FORMATS: dict[str, DecoderFormat] = {
    "gpt2": GPT2(),
    "llama": Llama(),
    "mistral": Llama(),
    "qwen2": Qwen2(),
    "saccade-decoder": SaccadeFormat(),
}
_WRITTEN = ("llama", "gpt2", "saccade-decoder")  # the first that can express the model


def read_decoder(where: str, path: str | os.PathLike[str], make: type[M]) -> M:
    """See `Decoder.from_pretrained`."""
    folder = Path(path)
    told = read_config(where, folder)
    kind = told.get("model_type")
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise unsupported(where, "Decoder", [f"model_type is {kind!r}, not one of {', '.join(_FORMATS)}"])
    check_types(where, told)
    return load(where, folder, told, _FORMATS[kind], make)


def write_decoder(
    where: str,
    path: str | os.PathLike[str],
    config: DecoderConfig,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer | None,
) -> None:
    """See `Decoder.save_pretrained`."""
    reasons = {name: _FORMATS[name].reasons_to_write(config) for name in _WRITTEN}
    form = next((_FORMATS[name] for name in _WRITTEN if not reasons[name]), None)
    if form is None:
        hint = "a decoder without this mask has the same weights; the mask may also be passed with each call"
        raise unsupported(where, "config.json", reasons["saccade-decoder"], hint=hint)
    state = {own: weight.detach().cpu() for own, weight in weights.items()}
    write_folder(where, Path(path), form.write_config(config), their_weights(form.entries(state), state), tokenizer)
