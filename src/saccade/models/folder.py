"""The files of a published model: its configuration, weights and tokenizer. Nothing is ever unpickled."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from saccade.errors import missing_extra, value_error

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["read_config", "read_tokenizer", "read_weights"]

_WEIGHTS = "model.safetensors"


def read_config(where: str, folder: Path) -> dict[str, Any]:
    """Read ``config.json``.

    Raises:
        ValueError: no such file, or not a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise value_error(where, "path", "be a folder with config.json", repr(str(folder)))
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise value_error(where, "config.json", "be JSON", f"{error}") from None
    if not isinstance(config, dict):
        raise value_error(where, "config.json", "be a JSON object", f"a {type(config).__name__}")
    return config


def read_weights(where: str, folder: Path) -> dict[str, Tensor]:
    """Read ``model.safetensors``: name -> tensor.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: no such file, or not in that format.
    """
    try:
        from safetensors import SafetensorError  # noqa: PLC0415  imported when used
        from safetensors.torch import load_file  # noqa: PLC0415
    except ModuleNotFoundError:
        raise missing_extra(where, "safetensors", "models") from None
    path = folder / _WEIGHTS
    if not path.is_file():
        others = sorted(found.name for found in folder.iterdir() if found.suffix in {".bin", ".safetensors", ".pt"})
        raise value_error(
            where,
            "path",
            f"have its weights in one {_WEIGHTS}",
            f"only {', '.join(others)}" if others else "no weights",
            hint="pickled weights (.bin, .pt) can run code when they are read, so they are not read here; "
            "transformers' save_pretrained(folder) writes safetensors.",
        )
    try:
        return load_file(path)
    except SafetensorError as error:
        raise value_error(where, _WEIGHTS, "be in safetensors format", f"{error}") from None


def read_tokenizer(where: str, folder: Path) -> "Tokenizer | None":
    """Read ``tokenizer.json``; None when there is no such file.

    The cutting and padding that the file asks for is turned off: a text keeps all its tokens, and gets no
    others.

    Raises:
        ImportError: the file is there, but tokenizers is not installed.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415  imported when used
    except ModuleNotFoundError:
        raise missing_extra(where, "tokenizers", "models") from None
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
