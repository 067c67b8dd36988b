"""FileFormat: the config.json keys and the weight names of a family of checkpoints."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade.masks import Causal, Mask
from saccade.masks.convert.patterns import window_size
from saccade.models.decoder_config import DecoderConfig
from saccade.models.rope_config import rope_parameters_of
from saccade.nn.feed_forward import Activation
from saccade.support.errors import value_error

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Saccade's names of activations, by the names in published configurations."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor in a published checkpoint file, and the names of our model's tensors that it contains.

    Args:
        name: name of the tensor in the file.
        our_names: names of our tensors; several if the file's tensor concatenates them.
        transposed: whether the file's tensor is the transpose of ours.
    """

    name: str
    our_names: tuple[str, ...]
    transposed: bool = False

    def shape(self, state: Mapping[str, Tensor]) -> torch.Size:
        """Return the shape that the file's tensor must have, computed from our tensors in ``state``."""
        rows = sum(state[name].shape[0] for name in self.our_names)
        shape = (rows, *state[self.our_names[0]].shape[1:])
        return torch.Size(reversed(shape) if self.transposed else shape)


class FileFormat(ABC):
    """The format of a family of checkpoints: its config.json keys and its weight names.

    Attributes:
        sizes: the required keys of config.json, mapped to our names.
        stacks: maps each field of our config that counts layers to two prefixes of these layers' weight names: ours and
            the file's. The number of the layer follows the prefix.
        names: our names for model and layer components, mapped to the file's names.
        activation_key: the config.json key of the activation's name.
        activation: the activation's published name if config.json has none.
    """

    sizes: ClassVar[Mapping[str, str]] = {
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_len",
        "hidden_size": "embed_dim",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "intermediate_size": "feed_forward_dim",
    }
    stacks: ClassVar[Mapping[str, tuple[str, str]]] = {"num_layers": ("stack.layers", "stack.layers")}
    names: ClassVar[Mapping[str, str]]
    activation_key: ClassVar[str] = "hidden_act"
    activation: ClassVar[str]

    @abstractmethod
    def reasons_to_read(self, config: Mapping[str, Any]) -> list[str]:
        """Return the reasons why we cannot reproduce a checkpoint's model exactly; an empty list if we can."""

    @abstractmethod
    def read_config(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Any:
        """Convert the contents of a checkpoint's config.json to our config; `reasons_to_read` must be empty."""

    @abstractmethod
    def sides(self, config: Any) -> tuple[str, ...]:
        """Return the names of the fields in our config that must each equal a dimension of some checkpoint weight."""

    @abstractmethod
    def clean_weights(self, weights: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
        """Return the checkpoint's weights, renamed as in `entries`, without weights that do not affect the output."""

    def reasons_to_write(self, config: Any) -> list[str]:
        """Return the reasons why this checkpoint format cannot express a model; an empty list if it can."""
        return []

    def write_config(self, config: Any) -> dict[str, Any]:
        """Return the contents of config.json for a model that this checkpoint format can express."""
        raise NotImplementedError

    def entries(self, our_names: Iterable[str]) -> list[Entry]:
        """Return an `Entry` for every tensor that our model's checkpoint must contain.

        Args:
            our_names: the names of all tensors in our model.
        """
        grouped: dict[str, list[str]] = {}
        for name in our_names:
            grouped.setdefault(self._published_name(name), []).append(name)
        return [Entry(theirs, tuple(ours), self._is_transposed(theirs)) for theirs, ours in grouped.items()]

    def write_weights(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert our state dict to the tensors to store in a checkpoint."""
        weights = {}
        for entry in self.entries(state):
            parts = [state[name] for name in entry.our_names]
            whole = torch.cat(parts) if len(parts) > 1 else parts[0]
            weights[entry.name] = (whole.T if entry.transposed else whole).contiguous()
        return weights

    def _published_name(self, our_name: str) -> str:
        part, _, kind = our_name.rpartition(".")
        for ours, theirs in self.stacks.values():
            if part.startswith(f"{ours}."):
                number, _, inner = part.removeprefix(f"{ours}.").partition(".")
                return f"{theirs}.{number}.{self.names[inner]}.{kind}"
        return f"{self.names[part]}.{kind}"

    def _is_transposed(self, name: str) -> bool:
        """Return whether the checkpoint stores a tensor as the transpose of ours."""
        return False

    def _activation(self, config: Mapping[str, Any]) -> str:
        return config.get(self.activation_key) or self.activation

    def _activation_reasons(self, config: Mapping[str, Any]) -> list[str]:
        name = self._activation(config)
        if isinstance(name, str) and name in ACTIVATIONS:
            return []
        return [f"{self.activation_key} is {name!r}, not one of {', '.join(ACTIVATIONS)}"]

    def _required(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the required values of config.json under our names. Raise an error that lists all missing keys."""
        missing = [key for key in self.sizes if config.get(key) is None]
        if missing:
            raise value_error("config.json", f"have {', '.join(self.sizes)}", f"no {', '.join(missing)}")
        return {ours: config[key] for key, ours in self.sizes.items()}


class DecoderFormat(FileFormat):
    """The checkpoint format of a family of decoders.

    Attributes:
        prefix: prefix of all weight names except the head's; older files omit it.
        ignored: name suffixes of constants in the file, which are not read.
    """

    prefix: ClassVar[str]
    ignored: ClassVar[tuple[str, ...]]

    def sides(self, config: DecoderConfig) -> tuple[str, ...]:
        learned = ("max_len",) if config.position_encoding in ("learned", "relative") else ()
        return ("vocab_size", "embed_dim", "feed_forward_dim", *learned)

    def clean_weights(self, weights: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
        cleaned = {
            name if name.startswith((self.prefix, "lm_head.")) else f"{self.prefix}{name}": weight
            for name, weight in weights.items()
            if not name.endswith(self.ignored)
        }
        return self._without_tied_head(cleaned) if config.tied else cleaned

    def _without_tied_head(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Remove an output head that duplicates the embeddings. Raise an error if the two tensors differ."""
        head, embedding = "lm_head.weight", f"{self.names['embedding']}.weight"
        if head in weights and embedding in weights and not torch.equal(weights[head], weights[embedding]):
            hint = "set tie_word_embeddings to false if the model has a separate output head"
            raise value_error(
                head, f"be equal to {embedding}, because tie_word_embeddings is true", "another tensor", hint=hint
            )
        return {name: weight for name, weight in weights.items() if name != head}


PLAIN: Mapping[str, object] = {
    field.name: field.default
    for field in dataclasses.fields(DecoderConfig)
    if field.name
    in (
        *("qk_norm", "attention_scale", "softcap", "rotary_layout", "layers", "norm_first", "part_norm", "parallel"),
        *("short_convolution", "kv_layers", "value_residual", "num_experts"),
        *("embedding_scale", "logit_scale", "logit_softcap"),
    )
}
"""Decoder options that GPT-2's and Llama's formats cannot express, with the value that both formats imply."""


def differences(config: DecoderConfig, expected: Mapping[str, object]) -> list[str]:
    """Describe each field of a config whose value a checkpoint format cannot express."""
    actual = {name: getattr(config, name) for name in expected}
    return [f"{name} is {value}, not {expected[name]}" for name, value in actual.items() if value != expected[name]]


def reasons_no_format_can_express(
    config: DecoderConfig, expressed: Callable[[Mask], object] = lambda mask: None
) -> list[str]:
    """Return the reasons why no published checkpoint format can express a model's mask or rotary scaling.

    Args:
        config: the model's config.
        expressed: a function that returns None for a mask that the format cannot express. It need not support windows,
            which every format can express.

    Returns:
        The reasons; an empty list if a format can express both.
    """
    reasons = []
    for pattern in dict.fromkeys(config.own_patterns):
        mask = pattern.mask
        if mask is not None and window_size(Causal() & mask) is None and expressed(mask) is None:
            reasons.append(f"its mask is {pattern.mask}: config.json can only express a sliding window")
        if rope_parameters_of(pattern.rotary_base, pattern.rotary_scaling) is None:
            reasons.append(f"its rotary_scaling is {pattern.rotary_scaling}, which config.json cannot express")
    return reasons


def end_tokens_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the end tokens in config.json as a tuple, which may be empty."""
    tokens = config.get("eos_token_id")
    if tokens is None:
        return ()
    return tuple(tokens) if isinstance(tokens, list) else (tokens,)
