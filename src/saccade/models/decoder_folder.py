"""A decoder's folder: read in any form that we know, written in the one most others read."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from saccade.errors import unsupported
from saccade.models.config_types import check_types
from saccade.models.decoder_config import DecoderConfig
from saccade.models.folder import read_config, read_shapes, read_tokenizer, read_weights, write_folder
from saccade.models.form import Form
from saccade.models.gpt2 import GPT2
from saccade.models.llama import Llama, Qwen2
from saccade.models.own_form import OwnForm
from saccade.models.sizes import check_sizes, shapes_of
from saccade.models.weights import check_fit, our_weights, shape_of, their_weights

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["read_decoder", "write_decoder"]

_FORMS: dict[str, Form] = {
    "gpt2": GPT2(),
    "llama": Llama(),
    "mistral": Llama(),
    "qwen2": Qwen2(),
    "saccade-decoder": OwnForm(),
}
_WRITTEN = ("llama", "gpt2", "saccade-decoder")  # the first that has words for the model


def read_decoder(where: str, path: str | os.PathLike[str], make: Callable[..., Any]) -> Any:
    """See `Decoder.from_pretrained`; ``make(config, tokenizer)`` makes the module."""
    folder = Path(path)
    told = read_config(where, folder)
    form = _form_of(where, told)
    config = form.read_config(where, told)
    shapes = _fitting_shapes(where, form, config, read_shapes(where, folder), make)
    weights = form.plain(where, read_weights(where, folder), config)
    tokenizer = read_tokenizer(where, folder)
    with torch.device("meta"):  # shapes only: the weights are about to be replaced
        decoder = make(config, tokenizer)
    decoder.load_state_dict(our_weights(where, form.entries(config, shapes), weights, shapes), assign=True)
    return decoder.eval()


def _fitting_shapes(
    where: str, form: Form, config: DecoderConfig, stated: Mapping[str, Tensor], make: Callable[..., Any]
) -> dict[str, Tensor]:
    """Our weights by their shapes; raises unless the files have these, which is known before a layer is made."""
    learned = {"max_len": config.max_len} if config.position_encoding == "learned" else {}
    sizes = {name: getattr(config, name) for name in ("vocab_size", "embed_dim", "feed_forward_dim")} | learned
    check_sizes(where, stated, num_layers=config.num_layers, **sizes)
    shapes = shapes_of(make, config, "stack.layers")
    wanted = {entry.name: shape_of(entry, shapes) for entry in form.entries(config, shapes)}
    check_fit(where, form.plain(where, stated, config), wanted)
    return shapes


def write_decoder(
    where: str,
    path: str | os.PathLike[str],
    config: DecoderConfig,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer | None,
) -> None:
    """See `Decoder.save_pretrained`."""
    reasons = {name: _FORMS[name].reasons_to_write(config) for name in _WRITTEN}
    name = next((name for name in _WRITTEN if not reasons[name]), None)
    if name is None:
        hint = "a decoder without this mask has the same weights; the mask may also be passed with each call"
        raise unsupported(where, "config.json", reasons["saccade-decoder"], hint=hint)
    state = {own: weight.detach().cpu() for own, weight in weights.items()}
    theirs = their_weights(_FORMS[name].entries(config, state), state)
    write_folder(where, Path(path), _FORMS[name].write_config(config), theirs, tokenizer)


def _form_of(where: str, told: dict[str, Any]) -> Form:
    """The form that this config.json is in, where there is nothing in it that we would compute differently."""
    kind = told.get("model_type")
    form = _FORMS.get(kind) if isinstance(kind, str) else None
    if form is None:
        raise unsupported(where, "Decoder", [f"model_type is {kind!r}, not one of {', '.join(_FORMS)}"])
    check_types(where, told)
    reasons = form.reasons_to_read(told)
    if told.get("quantization_config") is not None:
        reasons.append("it has a quantization_config: its weights are codes, not numbers")
    if reasons:
        raise unsupported(where, "Decoder", reasons)
    return form
