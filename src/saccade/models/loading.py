"""Loading: a model with published weights, whose sizes are compared with its configuration before anything is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from saccade.models.checkpoint_folder import check_types, read_tokenizer, read_weights
from saccade.models.checkpoint_format import Entry, FileFormat
from saccade.support.errors import type_error, unsupported, value_error
from saccade.support.validation import check_type

__all__ = ["built", "check_fit", "check_tensors", "load", "words_of"]

M = TypeVar("M", bound=nn.Module)
_ANY = 1 << 20  # a side of this length can be made without harm, and is compared with the weights later


def load(folder: Path, told: Mapping[str, Any], form: FileFormat, make: type[M]) -> M:
    """A model in float32 and eval mode, from the weights of a folder and its tokenizer, if there is one.

    Args:
        folder: where the files are.
        told: what config.json says.
        form: how to read it.
        make: the model, made of a config and a tokenizer.

    Raises:
        UnsupportedError: a model that we would compute differently; every reason is listed.
        ValueError: a file is missing or broken, or the weights do not fit the configuration.
    """
    config = _config(told, form, make)
    weights = read_weights(folder)
    return _filled(config, weights, form, make, torch.float32, lambda: read_tokenizer(folder))


def built(
    told: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    form: FileFormat,
    make: type[M],
    dtype: torch.dtype,
    tokenizer: Any,
) -> M:
    """The same of what a config.json says and a state dict, which are in memory.

    Raises:
        TypeError: no state dict, or a dtype that is no float's.
    """
    check_tensors(weights)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise type_error("dtype", "be a dtype of floats", dtype)
    return _filled(_config(told, form, make), weights, form, make, dtype, lambda: tokenizer)


def check_tensors(weights: object) -> None:
    """Raise unless a state dict is a mapping to tensors."""
    for name, x in check_type("state_dict", weights, Mapping, "be a state dict of tensors").items():
        check_type(f"state_dict[{name!r}]", x, Tensor, "be a tensor")


def words_of(config: object) -> Mapping[str, Any]:
    """What a config.json says: a dict of it as it is, or one of transformers' configs. Types are checked."""
    told = config.to_dict() if hasattr(config, "to_dict") else config
    hint = "json.load(open('config.json')), or a config of transformers"
    told = check_type("config", told, Mapping, "be a dict as config.json holds it", hint=hint)
    check_types(told)
    return told


def _config(told: Mapping[str, Any], form: FileFormat, make: type[nn.Module]) -> Any:
    reasons = form.reasons_to_read(told)
    if told.get("quantization_config") is not None:
        reasons.append("it has a quantization_config: its weights are codes, not numbers")
    if reasons:
        raise unsupported(make.__name__, reasons)
    return form.read_config(told)


def _filled(
    config: Any,
    weights: Mapping[str, Tensor],
    form: FileFormat,
    make: type[M],
    dtype: torch.dtype,
    tokenizer: Callable[[], Any],
) -> M:
    """A model of a config, with weights that fit it."""
    _check_sizes(config, form, weights)
    shapes = _shapes(make, config, form)
    state = _our_weights(form.entries(shapes), form.plain(weights, config), shapes, dtype)
    own = tokenizer()
    with torch.device("meta"):  # shapes only: the weights are about to be replaced
        model = make(config) if own is None else make(config, own)
    model.load_state_dict(state, assign=True)
    return model.eval()


def _check_sizes(config: Any, form: FileFormat, weights: Mapping[str, Tensor]) -> None:
    """Refuse a config.json that speaks of more than the files hold: nothing of such a size is made then.

    A layer has at least one tensor, and each of the format's ``sides`` is the length of some tensor's side. Which one
    does not fit is told later, unless it is huge.
    """
    rule = "tell of sizes that the weights have"
    for layers in (getattr(config, count) for count in form.stacks):
        if layers > len(weights):
            raise value_error("config.json", rule, f"{layers} layers, and {len(weights)} tensors")
    longest = max((max(x.shape) for x in weights.values() if x.numel() and x.dim()), default=0)
    for name in form.sides(config):
        if getattr(config, name) > max(longest, _ANY):
            got = f"{name} {getattr(config, name)}, and tensors of at most {longest}"
            raise value_error("config.json", rule, got)


def _shapes(make: type[nn.Module], config: Any, form: FileFormat) -> dict[str, Tensor]:
    """A model's weights without memory. The layers of a stack are alike: one is made, however many there are."""
    with torch.device("meta"):
        state = make(dataclasses.replace(config, **dict.fromkeys(form.stacks, 1))).state_dict()
    found = dict[str, Tensor]()
    for name, x in state.items():
        own = {name: x}
        for count, (layers, _) in form.stacks.items():
            inner = name.removeprefix(f"{layers}.0.")
            if inner != name:
                own = {f"{layers}.{number}.{inner}": x for number in range(getattr(config, count))}
        found |= own
    return found


def _our_weights(
    entries: Iterable[Entry],
    published: Mapping[str, Tensor],
    state: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """A state dict of ours, with memory of its own, from the tensors of a file.

    Args:
        entries: what the file must hold, no more and no less.
        published: the tensors of the file.
        state: a state dict of the model, for its shapes.
        dtype: that of ours.

    Raises:
        ValueError: tensors are missing, are too many, have other shapes or hold no floats; each is named.
    """
    entries = list(entries)
    check_fit(published, {entry.name: entry.shape(state) for entry in entries})
    found = {}
    for entry in entries:
        # Copies: the tensors of the file are views of it, and the file may be changed while the model lives.
        theirs = published[entry.name].to(dtype)
        theirs = theirs.T if entry.transposed else theirs
        parts = theirs.split([state[own].shape[0] for own in entry.own])
        for own, part in zip(entry.own, parts, strict=True):
            found[own] = part.clone(memory_format=torch.contiguous_format)
    return found


def check_fit(weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Refuse weights that are not exactly those of the model, and say which ones are not."""
    facts = [f"missing     {name}" for name in shapes if name not in weights]
    facts += [f"unexpected  {name}" for name in weights if name not in shapes]
    for name, shape in shapes.items():
        if name in weights and weights[name].shape != shape:
            facts.append(f"misfit      {name} {list(weights[name].shape)}, not {list(shape)}")
    facts += [f"no floats   {name} {w.dtype}" for name, w in weights.items() if not w.is_floating_point()]
    if facts:
        shown = facts if len(facts) <= 12 else [*facts[:12], f"and {len(facts) - 12} more"]
        got = f"{len(facts)} that do not"
        raise value_error("model.safetensors", "have the weights that config.json tells of", got, facts=shown)
