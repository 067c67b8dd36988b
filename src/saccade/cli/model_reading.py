"""Run a model on a text to get the matrices of all layers and the words of their rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from saccade.cli.loading import NAMED, load
from saccade.cli.text_windows import Window, windows_of
from saccade.cli.transformers_model import TransformersModel, load_transformers
from saccade.matrix import Matrix
from saccade.models import Decoder, Encoder, EncoderDecoder
from saccade.models.checkpoint_folder import read_config
from saccade.support.errors import UnsupportedError, value_error
from saccade.text import Word, words

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CALLED_AS = "look"  # the name in error messages

Model = Encoder | Decoder | EncoderDecoder | TransformersModel


class Subject(NamedTuple):
    """The lazy matrices of all layers for a text, with the words of their rows and columns.

    Attributes:
        rows, columns: words of the queries and of the keys.
        matrices: one matrix for each layer, for one batch item.
        is_cross: whether rows and columns belong to two different texts.
        windows: all windows of the text; a single one if the model can read the full text.
        shown: the index of the window that the matrices belong to.
        most: maximum number of tokens in a window.
        unknown: the model's token for unknown words.
        row_tokens, column_tokens: tokens of the queries and of the keys, as spelled in the vocabulary.
    """

    rows: tuple[Word, ...]
    columns: tuple[Word, ...]
    matrices: list[Matrix]
    is_cross: bool
    windows: list[Window]
    shown: int
    most: int
    unknown: str
    row_tokens: tuple[str, ...]
    column_tokens: tuple[str, ...]


def load_model(name: str) -> Model:
    """Load a model by name or folder, using transformers for models that saccade does not support.

    Raises:
        ValueError, ImportError, UnsupportedError, OSError: neither library can load the model.
    """
    if name not in NAMED and (Path(name) / "config.json").is_file():
        config = read_config(Path(name))  # raises here, not in transformers, if the file cannot be read
        kind = config.get("model_type")
        if isinstance(kind, str) and kind in EncoderDecoder.formats:
            return EncoderDecoder.from_pretrained(name)
    try:
        return load(name)
    except (ValueError, UnsupportedError, KeyError):
        if name in NAMED or not (Path(name) / "config.json").is_file():
            raise
        return load_transformers(Path(name))


def subject_of(
    model: Model,
    name: str,
    text: Sequence[str],
    other: str | None,
    *,
    is_pretokenized: bool = False,
    window: int | None = None,
    at_once: int | None = None,
) -> Subject:
    """Run a model on a text, a window of it, or two texts.

    Args:
        model: the model.
        name: the model's name in messages.
        text: the text arguments of the command; joined by spaces, unless ``is_pretokenized``.
        other: the output text of an encoder-decoder; None for the attention within ``text``.
        is_pretokenized: whether each argument is one word.
        window: the index of the window if the text is longer than the model can read; by default, the first one.
        at_once: maximum number of tokens in a window; by default, the maximum of the model.

    Raises:
        ValueError: the model cannot read the texts; the message is one sentence.
    """
    if model.tokenizer is None:
        raise value_error("--model", "have a tokenizer.json", name)
    is_encoder_decoder = isinstance(model, EncoderDecoder) or (
        isinstance(model, TransformersModel) and model.is_encoder_decoder
    )
    if other is not None and not is_encoder_decoder:
        raise value_error("--to", "be left out if the model is not an encoder-decoder", name)
    most = model.max_len if isinstance(model, TransformersModel) else model.config.max_len
    most, unknown = min(most, at_once or most), _unknown(model)
    windows = _split_into_windows(
        model.tokenizer, unknown, most, "TEXT", list(text) if is_pretokenized else " ".join(text)
    )
    shown = window or 0
    if shown >= len(windows):
        raise value_error("--window", f"be from 0 to {len(windows) - 1} for this text", shown)
    found = windows[shown].words
    tokens = torch.tensor([windows[shown].tokens])
    pieces = _pieces(model.tokenizer, windows[shown])
    if other is None:
        with torch.no_grad():
            matrices = model.matrices(tokens)
        return Subject(found, found, matrices, False, windows, shown, most, unknown, pieces, pieces)
    assert isinstance(model, EncoderDecoder | TransformersModel)
    written = _split_into_windows(model.tokenizer, unknown, most, "--to", other)
    for argument, own in (("TEXT", windows), ("--to", written)):
        if len(own) > 1:
            got = f"{own[-1].stop}, {name} reads no more"
            raise value_error(argument, f"have at most {most} tokens together with another text", got)
    with torch.no_grad():
        matrices = model.cross_matrices(tokens, torch.tensor([written[0].tokens]))
    answer = _pieces(model.tokenizer, written[0])
    return Subject(written[0].words, found, matrices, True, windows, shown, most, unknown, answer, pieces)


def _pieces(tokenizer: Tokenizer, window: Window) -> tuple[str, ...]:
    return tuple(tokenizer.id_to_token(number) or str(number) for number in window.tokens)


def _unknown(model: Model) -> str:
    """Return the model's token for unknown words."""
    if isinstance(model, TransformersModel):
        return model.unknown
    assert model.tokenizer is not None
    return getattr(model.tokenizer.model, "unk_token", None) or "[UNK]"


def _split_into_windows(
    tokenizer: Tokenizer, unknown: str, most: int, argument: str, text: str | list[str]
) -> list[Window]:
    """Split a text into windows with their tokens and words."""
    joined = text if isinstance(text, str) else " ".join(text)
    if not joined.strip():
        raise value_error(argument, "have at least one word", "an empty text")
    if any("\ud800" <= character <= "\udfff" for character in joined):
        raise value_error(argument, "be valid UTF-8", "bytes that are not")
    encoding = tokenizer.encode(text, is_pretokenized=not isinstance(text, str))
    number = tokenizer.token_to_id(unknown)
    # Some tokenizers spell unknown tokens as in the text, so that only their id shows that they are unknown.
    spelled = [unknown if one == number else token for one, token in zip(encoding.ids, encoding.tokens, strict=True)]
    read = words(_Encoded(spelled, encoding.word_ids, encoding.offsets), text, unknown=unknown)
    if all(word.special for word in read):
        raise value_error(argument, "have at least one word", "only characters that the model does not read")
    return windows_of(encoding.ids, read, most)


class _Encoded(NamedTuple):
    """An encoded text, reduced to the attributes that `words` needs."""

    tokens: list[str]
    word_ids: list[int | None]
    offsets: list[tuple[int, int]]
