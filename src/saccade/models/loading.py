"""Loading: a model with the weights of a folder, whose sizes are compared with the files before anything is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from saccade.errors import unsupported, value_error
from saccade.models.file_format import FileFormat
from saccade.models.folder import read_tokenizer, read_weights
from saccade.models.weights import our_weights

__all__ = ["load"]

M = TypeVar("M", bound=nn.Module)
_ANY = 1 << 20  # a side of this length can be made without harm, and is compared with the weights later


def load(where: str, folder: Path, told: Mapping[str, Any], form: FileFormat, make: type[M]) -> M:
    """A model in float32 and eval mode, from the weights of a folder and its tokenizer, if there is one.

    Args:
        where: the function, for the error message.
        folder: where the files are.
        told: what config.json says.
        form: how to read it.
        make: the model, made of a config and a tokenizer.

    Raises:
        UnsupportedError: a model that we would compute differently; every reason is listed.
        ValueError: a file is missing or broken, or the weights do not fit the configuration.
    """
    reasons = form.reasons_to_read(told)
    if told.get("quantization_config") is not None:
        reasons.append("it has a quantization_config: its weights are codes, not numbers")
    if reasons:
        raise unsupported(where, make.__name__, reasons)
    config = form.read_config(where, told)
    weights = read_weights(where, folder)
    _check_sizes(where, config, form.sides(config), weights)
    shapes = _shapes(make, config, form.layers[0])
    state = our_weights(where, form.entries(shapes), form.plain(where, weights, config), shapes)
    tokenizer = read_tokenizer(where, folder)
    with torch.device("meta"):  # shapes only: the weights are about to be replaced
        model = make(config, tokenizer)
    model.load_state_dict(state, assign=True)
    return model.eval()


def _check_sizes(where: str, config: Any, sides: tuple[str, ...], weights: Mapping[str, Tensor]) -> None:
    """Refuse a config.json that speaks of more than the files hold: nothing of such a size is made then.

    A layer has at least one tensor, and each of the ``sides`` is the length of some tensor's side. Which one does not
    fit is told later, unless it is huge.
    """
    rule = "tell of sizes that the weights have"
    if config.num_layers > len(weights):
        raise value_error(where, "config.json", rule, f"{config.num_layers} layers, and {len(weights)} tensors")
    longest = max((max(x.shape) for x in weights.values() if x.numel() and x.dim()), default=0)
    for name in sides:
        if getattr(config, name) > max(longest, _ANY):
            got = f"{name} {getattr(config, name)}, and tensors of at most {longest}"
            raise value_error(where, "config.json", rule, got)


def _shapes(make: type[nn.Module], config: Any, layers: str) -> dict[str, Tensor]:
    """A model's weights without memory. Layers are alike: one is made, however many there are."""
    with torch.device("meta"):
        state = make(dataclasses.replace(config, num_layers=1)).state_dict()
    first, found = f"{layers}.0.", dict[str, Tensor]()
    for name, x in state.items():
        inner = name.removeprefix(first)
        numbers = range(config.num_layers) if inner != name else ()
        found |= {f"{layers}.{number}.{inner}": x for number in numbers} or {name: x}
    return found
