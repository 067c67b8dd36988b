"""FileFormat: how one family of models writes its config.json, and what it calls its weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from saccade.models.config import DecoderConfig
from saccade.models.rope_config import rope_words
from saccade.nn.feed_forward import Activation
from saccade.plan import ALL, Groups
from saccade.plan.key_ranges import Universe
from saccade.support.errors import value_error

__all__ = [
    "ACTIVATIONS",
    "DecoderFormat",
    "Entry",
    "FileFormat",
    "differences",
    "end_tokens_of",
    "reasons_without_words",
    "window_of",
]

ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Activations by the names that published configurations use."""
_FAR = (1 << 62) - 1  # a position before which any window has begun


@dataclass(frozen=True)
class Entry:
    """One tensor of a published file.

    Args:
        name: its name there.
        own: our names; several where their tensor holds ours one below the other.
        transposed: whether it is the transpose of ours.
    """

    name: str
    own: tuple[str, ...]
    transposed: bool = False

    def shape(self, state: Mapping[str, Tensor]) -> torch.Size:
        """The shape that it must have for the tensors of ours."""
        rows = sum(state[own].shape[0] for own in self.own)
        shape = (rows, *state[self.own[0]].shape[1:])
        return torch.Size(reversed(shape) if self.transposed else shape)


class FileFormat(ABC):
    """How one family of models writes its config.json, and what it calls its weights.

    Attributes:
        sizes: keys that config.json must have, and our names for them.
        stacks: for each field of our config that counts layers, what the names of these layers' weights begin with,
            ours and theirs; the layer's number follows.
        names: our names of the parts of a model and of a layer, and theirs.
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

    @abstractmethod
    def reasons_to_read(self, config: Mapping[str, Any]) -> list[str]:
        """Why this config.json describes a model that we would compute differently; empty if it does not."""

    @abstractmethod
    def read_config(self, config: Mapping[str, Any]) -> Any:
        """Our config for a config.json that there are no reasons against."""

    @abstractmethod
    def sides(self, config: Any) -> tuple[str, ...]:
        """Which sizes of our config are the length of a weight's side."""

    @abstractmethod
    def plain(self, weights: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
        """The weights under the names of `entries`, without those that the answer does not depend on."""

    def entries(self, own: Iterable[str]) -> list[Entry]:
        """Every tensor of a file, by its name there and ours; ``own`` are all of our names."""
        found: dict[str, list[str]] = {}
        for name in own:
            found.setdefault(self._their_name(name), []).append(name)
        return [Entry(theirs, tuple(ours), self._is_transposed(theirs)) for theirs, ours in found.items()]

    def write_weights(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a file from a state dict of ours."""
        found = {}
        for entry in self.entries(state):
            whole = torch.cat([state[own] for own in entry.own]) if len(entry.own) > 1 else state[entry.own[0]]
            found[entry.name] = (whole.T if entry.transposed else whole).contiguous()
        return found

    def _their_name(self, own: str) -> str:
        part, _, kind = own.rpartition(".")
        for ours, theirs in self.stacks.values():
            if part.startswith(f"{ours}."):
                number, _, inner = part.removeprefix(f"{ours}.").partition(".")
                return f"{theirs}.{number}.{self.names[inner]}.{kind}"
        return f"{self.names[part]}.{kind}"

    def _is_transposed(self, name: str) -> bool:
        """Whether a tensor of a file is the transpose of ours."""
        return False

    def _required(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the keys that must be there, under our names; the error names all that are missing."""
        missing = [key for key in self.sizes if config.get(key) is None]
        if missing:
            raise value_error("config.json", f"have {', '.join(self.sizes)}", f"no {', '.join(missing)}")
        return {ours: config[key] for key, ours in self.sizes.items()}


class DecoderFormat(FileFormat):
    """How one family writes a decoder.

    Attributes:
        prefix: what the names of all weights but the head's begin with; older files leave it out.
        ignored: ends of the names of constants that a file may hold.
    """

    prefix: ClassVar[str]
    ignored: ClassVar[tuple[str, ...]]

    @abstractmethod
    def reasons_to_write(self, config: DecoderConfig) -> list[str]:
        """Why this format cannot express the model; empty if it can."""

    @abstractmethod
    def write_config(self, config: DecoderConfig) -> dict[str, Any]:
        """The config.json of a model that there are no reasons against."""

    def sides(self, config: DecoderConfig) -> tuple[str, ...]:
        learned = ("max_len",) if config.position_encoding in ("learned", "relative") else ()
        return ("vocab_size", "embed_dim", "feed_forward_dim", *learned)

    def plain(self, weights: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
        found = {
            name if name.startswith((self.prefix, "lm_head.")) else f"{self.prefix}{name}": weight
            for name, weight in weights.items()
            if not name.endswith(self.ignored)
        }
        return self._without_tied_head(found) if config.tied else found

    def _without_tied_head(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Leave out the second copy of the embeddings; raises if it is no copy."""
        head, embedding = "lm_head.weight", f"{self.names['embedding']}.weight"
        if head in weights and embedding in weights and not torch.equal(weights[head], weights[embedding]):
            hint = "set tie_word_embeddings to false if the model has a head of its own"
            raise value_error(head, f"be {embedding}, as tie_word_embeddings says", "another tensor", hint=hint)
        return {name: weight for name, weight in weights.items() if name != head}


def differences(config: DecoderConfig, wanted: Mapping[str, object]) -> list[str]:
    """Which fields of a config are not what a format can express."""
    given = {name: getattr(config, name) for name in wanted}
    return [f"{name} is {own}, not {wanted[name]}" for name, own in given.items() if own != wanted[name]]


def reasons_without_words(config: DecoderConfig) -> list[str]:
    """Why no config.json can express the mask or the rotary scaling of a model; empty if one can."""
    reasons = []
    if config.mask is not None and window_of(config) is None:
        reasons.append(f"its mask is {config.mask}: a file has words for a sliding window only")
    if rope_words(config.rotary_base, config.rotary_scaling) is None:
        reasons.append(f"its rotary_scaling is {config.rotary_scaling}, which a file has no words for")
    return reasons


def window_of(config: DecoderConfig) -> int | None:
    """The last tokens that a token sees, itself included; None where the mask is no plain sliding window."""
    mask = config.causal_mask
    if not (mask.is_relative and mask.is_causal):
        return None
    # A rule that reads distances alone says of one row, far from the beginning, what it says of all.
    row = np.asarray([_FAR])
    needed, sure = mask.bounds(Groups(np.asarray([ALL]), row, row), Universe(np.asarray([0]), row + 1))
    seen = needed.starts < needed.ends
    if seen.sum() != 1 or int(needed.sizes()[0]) != int(sure.sizes()[0]):
        return None
    first, stop = int(needed.starts[seen][0]), int(needed.ends[seen][0])
    return stop - first if first > 0 and stop == _FAR + 1 else None


def end_tokens_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text: config.json has none, one or several."""
    given = config.get("eos_token_id")
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list) else (given,)
