"""Pretrained: the base class of models that load published weights, after checking their sizes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from saccade.models.checkpoint_folder import check_types, read_config, read_tokenizer, read_weights, write_folder
from saccade.models.checkpoint_format import Entry, FileFormat
from saccade.nn.shared_keys import KEY_PARTS
from saccade.support.argument_hints import ArgumentHints
from saccade.support.errors import type_error, unsupported, value_error
from saccade.support.validation import check_type

if TYPE_CHECKING:
    from tokenizers import Tokenizer

M = TypeVar("M", bound=nn.Module)
_SAFE_SIDE = 1 << 20  # a dimension up to this length is safe to build; its exact length is checked later


class Pretrained(ArgumentHints, nn.Module):
    """The base class of models that load published weights.

    Attributes:
        formats: maps the ``model_type`` in ``config.json`` to the file format of that model family.
        default_type: the ``model_type`` to assume if ``config.json`` has none.
        reads_text: whether ``tokenizer.json`` is read and passed to the constructor.
    """

    formats: ClassVar[Mapping[str, FileFormat]]
    default_type: ClassVar[str | None] = None
    reads_text: ClassVar[bool] = False

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> Self:
        """Load a published model from a folder on disk, in float32 and eval mode.

        This method reads ``config.json``, the weights (``model.safetensors``, or several files with an index) and, for
        models that read text, ``tokenizer.json`` if it exists. It never reads pickled weights or runs code in the
        folder.

        Args:
            path: the folder.

        Raises:
            UnsupportedError: the model belongs to an unsupported family, or we would compute it differently. Every
                reason is listed.
            ValueError: a file is missing or broken, or the weights do not match the configuration.
            ImportError: safetensors or tokenizers is not installed.
        """
        folder = Path(path)
        return cls._build(
            read_config(folder),
            lambda: read_weights(folder),
            torch.float32,
            lambda: read_tokenizer(folder) if cls.reads_text else None,
        )

    @classmethod
    def from_state_dict(
        cls, config: object, state_dict: Mapping[str, Tensor], *, dtype: torch.dtype = torch.float32
    ) -> Self:
        """Build a pretrained model in eval mode from weights in memory. The weights are copied.

        Args:
            config: the contents of the model's ``config.json`` as a dict, or a transformers config.
            state_dict: the tensors under their published names or their names in transformers, in any float dtype.
            dtype: dtype of the model.

        Raises:
            UnsupportedError, ValueError: as in `from_pretrained`.
            TypeError: ``config`` is not a config, ``state_dict`` does not map to tensors, or ``dtype`` is not
                floating-point.
        """
        return cls._build(_config_dict(config), lambda: state_dict, dtype, lambda: None)

    @classmethod
    def _build(
        cls,
        config: Mapping[str, Any],
        weights: Callable[[], Mapping[str, Tensor]],
        dtype: torch.dtype,
        tokenizer: Callable[[], Any],
    ) -> Self:
        """Build a pretrained model from the contents of its config.json.

        The weights and the tokenizer are read only if the config is supported.
        """
        file_format = cls._format_of(config)
        check_types(config)
        return build(file_format, cls, config, weights, dtype, tokenizer)

    @classmethod
    def _format_of(cls, config: Mapping[str, Any]) -> FileFormat:
        """Return the file format for the ``model_type`` in a pretrained model's config.json.

        Raises:
            UnsupportedError: the model family is unknown. If the class has only one format, the error also lists why
                this format does not fit.
        """
        kind = config.get("model_type", cls.default_type)
        if isinstance(kind, str) and kind in cls.formats:
            return cls.formats[kind]
        if len(cls.formats) > 1:
            raise unsupported(cls.__name__, [f"model_type is {kind!r}, not one of {', '.join(cls.formats)}"])
        [(name, file_format)] = cls.formats.items()
        reasons = [f"model_type is {kind!r}, not {name!r}", *file_format.reasons_to_read(config)]
        raise unsupported(cls.__name__, reasons)


class PretrainedText(Pretrained):
    """The base class of pretrained models that have a tokenizer."""

    reads_text = True

    @classmethod
    def from_state_dict(
        cls,
        config: object,
        state_dict: Mapping[str, Tensor],
        *,
        tokenizer: Tokenizer | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Build a pretrained model in eval mode from weights in memory. The weights are copied.

        Args:
            config: the contents of the model's ``config.json`` as a dict, or a transformers config.
            state_dict: the tensors under their published names, as `from_pretrained` reads them, in any float dtype;
                for example the state dict of transformers' ``BertModel``, ``LlamaForCausalLM`` or ``CLIPModel``.
            tokenizer: stored with the model.
            dtype: dtype of the model.

        Raises:
            UnsupportedError, ValueError: as in `from_pretrained`.
            TypeError: ``config`` is not a config, ``state_dict`` does not map to tensors, or ``dtype`` is not
                floating-point.
        """
        return cls._build(_config_dict(config), lambda: state_dict, dtype, lambda: tokenizer)


class SavedText(PretrainedText):
    """The base class of pretrained text models that can also be saved, together with their tokenizer.

    Attributes:
        written_types: names of the `formats` for saving; `save_pretrained` uses the first that can express the model.
    """

    written_types: ClassVar[tuple[str, ...]]
    config: Any
    tokenizer: Tokenizer | None

    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """Save the model and its tokenizer in a folder, if possible in a format that transformers can read.

        Files are written under temporary names and then renamed, so that a reader sees either the old
        file or the new one, but never a partial file.

        Args:
            path: the folder, which is created if it does not exist. Other files in it are not touched.

        Raises:
            UnsupportedError: the model has a mask that no format can express.
            ImportError: safetensors is not installed.
        """
        formats = [self.formats[name] for name in self.written_types]
        file_format = next((each for each in formats if not each.reasons_to_write(self.config)), None)
        if file_format is None:
            hint = "a decoder without this mask has the same weights; the mask may also be passed with each call"
            raise unsupported("config.json", formats[-1].reasons_to_write(self.config), hint=hint)
        state = {name: weight.detach().cpu() for name, weight in self.state_dict().items()}
        config, weights = file_format.write_config(self.config), file_format.write_weights(state)
        write_folder(Path(path), config, weights, self.tokenizer)


def build(
    file_format: FileFormat,
    model_class: type[M],
    config: Mapping[str, Any],
    weights: Callable[[], Mapping[str, Tensor]],
    dtype: torch.dtype,
    tokenizer: Callable[[], Any],
) -> M:
    """Build a pretrained model in eval mode from the contents of its files.

    Args:
        file_format: the format of the files.
        model_class: the class of the model, called with a config and, if available, a tokenizer.
        config: the contents of config.json.
        weights: function that returns the tensors.
        dtype: dtype of the model.
        tokenizer: function that returns the tokenizer or None.

    Raises:
        UnsupportedError: we would compute the model differently. Every reason is listed.
        TypeError: the weights are not a state dict, or ``dtype`` is not floating-point.
        ValueError: the weights do not match the configuration.
    """
    reasons = file_format.reasons_to_read(config)
    if config.get("quantization_config") is not None:
        reasons.append("it has a quantization_config: its weights are codes, not numbers")
    if reasons:
        raise unsupported(model_class.__name__, reasons)
    tensors = weights()
    check_tensors(tensors)
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise type_error("dtype", "be a float dtype", dtype)
    ours = file_format.read_config(config, tensors)
    _check_sizes(ours, file_format, tensors)
    shapes = _meta_weights(model_class, ours, file_format)
    cleaned = file_format.clean_weights(tensors, ours)
    state = _convert_weights(file_format.entries(shapes), cleaned, shapes, dtype)
    loaded = tokenizer()
    with torch.device("meta"):  # allocates no memory; the weights are assigned next
        model = model_class(ours) if loaded is None else model_class(ours, loaded)
    model.load_state_dict(state, assign=True)
    return model.eval()


def check_tensors(weights: object) -> None:
    """Raise an error unless the weights are a mapping from names to tensors."""
    for name, x in check_type("state_dict", weights, Mapping, "be a state dict of tensors").items():
        check_type(f"state_dict[{name!r}]", x, Tensor, "be a tensor")


def check_fit(weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Raise an error unless the weights in a file have exactly the names and shapes that the model needs.

    The error lists all differences.
    """
    facts = [f"missing     {name}" for name in shapes if name not in weights]
    facts += [f"unexpected  {name}" for name in weights if name not in shapes]
    for name, shape in shapes.items():
        if name in weights and weights[name].shape != shape:
            facts.append(f"mismatched  {name} {list(weights[name].shape)}, not {list(shape)}")
    facts += [f"not float   {name} {w.dtype}" for name, w in weights.items() if not w.is_floating_point()]
    if facts:
        shown = facts if len(facts) <= 12 else [*facts[:12], f"and {len(facts) - 12} more"]
        got = f"{len(facts)} difference{'s' * (len(facts) > 1)}"
        raise value_error("model.safetensors", "have the weights that config.json describes", got, facts=shown)


def _config_dict(config: object) -> Mapping[str, Any]:
    """Return the contents of config.json as a dict.

    The argument may already be this dict, or a config object from transformers.
    """
    contents = config.to_dict() if hasattr(config, "to_dict") else config
    hint = "json.load(open('config.json')), or a config of transformers"
    return check_type("config", contents, Mapping, "be a dict with the contents of config.json", hint=hint)


def _check_sizes(config: Any, file_format: FileFormat, weights: Mapping[str, Tensor]) -> None:
    """Raise an error if config.json states larger sizes than the weights have.

    This check runs before the model is built, so that an invalid file cannot exhaust the memory. Each layer has at
    least one tensor, and each of the format's ``sides`` equals a dimension of some tensor. Smaller mismatches are
    reported later, with the tensor's name.
    """
    rule = "state sizes that match the weights"
    for layers in (getattr(config, count) for count in file_format.stacks):
        if layers > len(weights):
            raise value_error("config.json", rule, f"{layers} layers, but {len(weights)} tensors")
    longest = max((max(x.shape) for x in weights.values() if x.numel() and x.dim()), default=0)
    for name in file_format.sides(config):
        if getattr(config, name) > max(longest, _SAFE_SIDE):
            got = f"{name} {getattr(config, name)}, but no tensor with a dimension above {longest}"
            raise value_error("config.json", rule, got)


def _meta_weights(model_class: type[nn.Module], config: Any, file_format: FileFormat) -> dict[str, Tensor]:
    """Return tensors on torch's meta device with the names and shapes of a model's weights.

    Instead of the full model, only one layer of each stack is built, or, in a decoder, one layer for each set of weight
    names.
    """
    sources, small = getattr(config, "kv_layers", None), dict[str, Any](dict.fromkeys(file_format.stacks, 1))
    kinds = [(pattern.uses_qk_norm, pattern.uses_experts) for pattern in getattr(config, "layer_patterns", ())]
    built = list(dict.fromkeys(kinds))
    if len(built) > 1:
        small |= {"num_layers": len(built), "layers": tuple(config.layers[kinds.index(kind)] for kind in built)}
    with torch.device("meta"):
        if sources is not None:
            small["kv_layers"] = None
        if getattr(config, "value_residual", False):
            small["value_residual"] = False
        state = model_class(dataclasses.replace(config, **small)).state_dict()
    shapes = dict[str, Tensor]()
    for name, x in state.items():
        copies = {name: x}
        for count, (layers, _) in file_format.stacks.items():
            if name.startswith(f"{layers}."):
                number, _, inner = name.removeprefix(f"{layers}.").partition(".")
                alike = [i for i in range(getattr(config, count)) if not kinds or kinds[i] == built[int(number)]]
                copies = {f"{layers}.{i}.{inner}": x for i in alike}
        shapes |= copies
    if getattr(config, "value_residual", False):
        shapes["stack.value_weights"] = torch.empty(config.num_layers - 1, 2, device="meta")
    readers = [index for index, source in enumerate(sources or ()) if source != index]
    unused = tuple(f"stack.layers.{index}.attention.{part}." for index in readers for part in KEY_PARTS)
    return {name: x for name, x in shapes.items() if not name.startswith(unused)}


def _convert_weights(
    entries: Iterable[Entry],
    weights: Mapping[str, Tensor],
    shapes: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Convert the tensors in a checkpoint file to our model's state dict. All tensors are copied.

    Args:
        entries: the exact set of tensors that the file must contain.
        weights: the tensors in the file.
        shapes: a state dict of the model, for its shapes.
        dtype: dtype of the result.

    Raises:
        ValueError: a tensor is missing, unexpected, not floating-point or has the wrong shape; each such tensor is
            named.
    """
    entries = list(entries)
    check_fit(weights, {entry.name: entry.shape(shapes) for entry in entries})
    state = {}
    for entry in entries:
        # Copy, because the tensors are views of the file, which may change while the model is in use.
        tensor = weights[entry.name].to(dtype)
        tensor = tensor.T if entry.transposed else tensor
        parts = tensor.split([shapes[name].shape[0] for name in entry.our_names])
        for name, part in zip(entry.our_names, parts, strict=True):
            state[name] = part.clone(memory_format=torch.contiguous_format)
    return state
