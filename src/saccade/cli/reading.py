"""Reads a text with a model: the matrices of all layers, and the words of their rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Encoding, Tokenizer

from saccade.cli.loading import NAMED, load
from saccade.cli.transformers_model import TransformersModel, load_transformers
from saccade.errors import UnsupportedError, value_error
from saccade.matrix import Matrix
from saccade.models import Decoder, Encoder
from saccade.models.folder import read_config
from saccade.text import Word, words

__all__ = ["Model", "Subject", "load_model", "subject_of"]

Model = Encoder | Decoder | TransformersModel


class Subject(NamedTuple):
    """Matrices of all layers, lazily, and what their rows and columns stand for.

    Attributes:
        rows, columns: words of the queries and of the keys.
        matrices: one for each layer, of one batch item.
        is_cross: whether rows are of one text and columns of another.
    """

    rows: tuple[Word, ...]
    columns: tuple[Word, ...]
    matrices: list[Matrix]
    is_cross: bool


def load_model(name: str) -> Model:
    """Load a model by name or folder; forms that saccade does not know are loaded by transformers.

    Raises:
        ValueError, ImportError, UnsupportedError, OSError: neither knows it.
    """
    if name not in NAMED and (Path(name) / "config.json").is_file():
        read_config("look", Path(name))  # what nobody can read is not left to others
    try:
        return load(name)
    except (ValueError, UnsupportedError, KeyError):
        if name in NAMED or not (Path(name) / "config.json").is_file():
            raise
        return load_transformers(Path(name))


def subject_of(model: Model, name: str, text: Sequence[str], other: str | None, *, given: bool) -> Subject:
    """Run a model on a text, or on two.

    Args:
        model: what looks.
        name: what it is called in messages.
        text: arguments of the command; joined by spaces, unless ``given``.
        other: for a model that writes one text while it reads another: what it writes.
        given: each argument is one word.

    Raises:
        ValueError: texts that the model cannot read; the message is one sentence.
    """
    if model.tokenizer is None:
        raise value_error("look", "--model", "have a tokenizer.json", name)
    if other is not None and not (isinstance(model, TransformersModel) and model.is_pair):
        raise value_error("look", "--to", "be left out where a model reads one text (no encoder-decoder)", name)
    encoding, found = _read(model, name, "TEXT", list(text) if given else " ".join(text))
    tokens = torch.tensor([encoding.ids])
    if other is None:
        with torch.no_grad():
            return Subject(found, found, model.matrices(tokens), False)
    assert isinstance(model, TransformersModel)
    own, written = _read(model, name, "--to", other)
    return Subject(written, found, model.cross_matrices(tokens, torch.tensor([own.ids])), True)


def _read(model: Model, name: str, argument: str, text: str | list[str]) -> tuple[Encoding, tuple[Word, ...]]:
    """Tokens and words of a text."""
    joined = text if isinstance(text, str) else " ".join(text)
    if not joined.strip():
        raise value_error("look", argument, "have at least one word", "nothing to look at")
    if any("\ud800" <= character <= "\udfff" for character in joined):
        raise value_error("look", argument, "be valid UTF-8", "bytes that are not")
    tokenizer: Tokenizer | None = model.tokenizer
    assert tokenizer is not None
    encoding = tokenizer.encode(text, is_pretokenized=not isinstance(text, str))
    most = model.max_len if isinstance(model, TransformersModel) else model.config.max_len
    if len(encoding.ids) > most:
        raise value_error("look", argument, f"have at most {most} tokens", f"{len(encoding.ids)}, {name} reads no more")
    unknown = model.unknown if isinstance(model, TransformersModel) else "[UNK]"
    found = words(encoding, text, unknown=unknown)
    if all(word.special for word in found):
        raise value_error("look", argument, "have at least one word", "only characters that the model does not read")
    return encoding, found
