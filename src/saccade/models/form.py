"""Form: how one family of published folders spells a decoder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from saccade.errors import value_error
from saccade.models.decoder_config import DecoderConfig
from saccade.models.weights import Entry

__all__ = ["Form", "end_tokens_of", "required", "without_tied_head"]


class Form(ABC):
    """How one family of published folders spells a decoder: the keys of config.json, the names of the weights."""

    @abstractmethod
    def reasons_to_read(self, config: Mapping[str, Any]) -> list[str]:
        """Why this config.json tells of a model that we would compute differently; empty: it does not."""

    @abstractmethod
    def read_config(self, where: str, config: Mapping[str, Any]) -> DecoderConfig:
        """Our words for a config.json that there are no reasons against."""

    @abstractmethod
    def reasons_to_write(self, config: DecoderConfig) -> list[str]:
        """Why the form has no words for this model; empty: it has."""

    @abstractmethod
    def write_config(self, config: DecoderConfig) -> dict[str, Any]:
        """A config.json for a model that there are no reasons against."""

    @abstractmethod
    def entries(self, config: DecoderConfig, own: Iterable[str]) -> list[Entry]:
        """Every weight, by its name and ours; ``own`` are all of our names."""

    def plain(self, where: str, weights: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
        """The weights under the names of `entries`, without what no logit depends on.

        They may be told by their shapes alone, as tensors without memory.
        """
        del where, config
        return dict(weights)


def required(where: str, config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The values of keys that must be there, under our names.

    Raises:
        ValueError: some are missing; all of these are named.
    """
    missing = [key for key in names if config.get(key) is None]
    if missing:
        raise value_error(where, "config.json", f"have {', '.join(names)}", f"no {', '.join(missing)}")
    return {ours: config[key] for key, ours in names.items()}


def end_tokens_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text: none, one or several in config.json."""
    given = config.get("eos_token_id")
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list) else (given,)


def without_tied_head(where: str, weights: dict[str, Tensor], head: str, embedding: str) -> dict[str, Tensor]:
    """Leave out a second copy of the embeddings.

    Raises:
        ValueError: it is no copy.
    """
    is_told = head in weights and embedding in weights and not weights[head].is_meta  # of headers only shapes are known
    if is_told and not torch.equal(weights[head], weights[embedding]):
        rule = f"be {embedding}, as tie_word_embeddings says"
        hint = "set tie_word_embeddings to false if the model has a head of its own"
        raise value_error(where, head, rule, "another tensor", hint=hint)
    return {name: weight for name, weight in weights.items() if name != head}
