"""The files of a published model: its configuration, weights and tokenizer. Nothing is ever unpickled."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from saccade.errors import missing_extra, value_error

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["read_config", "read_tokenizer", "read_weights", "write_folder"]

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def read_config(where: str, folder: Path) -> dict[str, Any]:
    """Read ``config.json``.

    Raises:
        ValueError: no such file, or not a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise value_error(where, "path", "be a folder with config.json", repr(str(folder)))
    return _read_object(where, path)


def read_weights(where: str, folder: Path) -> dict[str, Tensor]:
    """The tensors of ``model.safetensors``, or of the files that ``model.safetensors.index.json`` names, by name.

    Files are mapped into memory: what they hold is read where it is used, and shapes cost nothing.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: no such file, or not in that format.
    """
    try:
        from safetensors import SafetensorError  # noqa: PLC0415  imported when used
        from safetensors.torch import load_file  # noqa: PLC0415
    except ModuleNotFoundError:
        raise missing_extra(where, "safetensors", "models") from None
    weights: dict[str, Tensor] = {}
    for path in _weight_files(where, folder):
        try:
            weights |= load_file(path)
        except (SafetensorError, RuntimeError, TypeError) as error:  # sides so long that torch cannot count them
            got = str(error).partition("\n")[0]
            raise value_error(where, path.name, "be in safetensors format", got) from None
    return weights


def write_folder(
    where: str,
    folder: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    tokenizer: "Tokenizer | None",
) -> None:
    """Write ``model.safetensors``, ``tokenizer.json`` where there is a tokenizer, and last ``config.json``.

    Each is written under another name first; all are renamed when all are complete.

    Raises:
        ImportError: safetensors is not installed.
        OSError: the folder cannot be written.
    """
    try:
        from safetensors.torch import save_file  # noqa: PLC0415  imported when used
    except ModuleNotFoundError:
        raise missing_extra(where, "safetensors", "models") from None

    # transformers asks for this word
    writers: dict[str, Callable[[Path], object]] = {
        _WEIGHTS: lambda path: save_file(dict(weights), path, metadata={"format": "pt"})
    }
    if tokenizer is not None:
        writers["tokenizer.json"] = lambda path: tokenizer.save(str(path))
    writers["config.json"] = lambda path: path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    beside = {name: folder / f".{name}.{os.getpid()}.part" for name in writers}
    try:
        for name, write in writers.items():
            write(beside[name])
        for name in writers:
            # safetensors makes files that only their owner reads; these are as readable as any other.
            shutil.copymode(beside["config.json"], beside[name])
        for name in writers:
            os.replace(beside[name], folder / name)
    finally:
        for path in beside.values():
            path.unlink(missing_ok=True)


def read_tokenizer(where: str, folder: Path) -> "Tokenizer | None":
    """Read ``tokenizer.json``; None when there is no such file.

    Truncation and padding are turned off, whatever the file says: a text keeps all its tokens, and gets no others.

    Raises:
        ImportError: the file is there, but tokenizers is not installed.
        ValueError: the file is there, but no tokenizer is in it.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415  imported when used
    except ModuleNotFoundError:
        raise missing_extra(where, "tokenizers", "models") from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise value_error(where, path.name, "be a tokenizer that the package tokenizers reads", f"{error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _weight_files(where: str, folder: Path) -> list[Path]:
    """The files that hold the weights."""
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    if not (folder / _INDEX).is_file():
        others = sorted(found.name for found in folder.iterdir() if found.suffix in {".bin", ".safetensors", ".pt"})
        got = f"only {', '.join(others)}" if others else "no weights"
        hint = (
            f"or in several files and a {_INDEX}; pickled weights (.bin, .pt) can run code when they are read, so they "
            "are not read here; transformers' save_pretrained(folder) writes safetensors."
        )
        raise value_error(where, "path", f"have its weights in one {_WEIGHTS}", got, hint=hint)
    listed = _read_object(where, folder / _INDEX).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise value_error(where, _INDEX, "have a weight_map of names to files", f"a {type(listed).__name__}")
    names = sorted(set(map(str, listed.values())))
    for name in names:
        # Files of this folder and no others: an index is data from elsewhere.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise value_error(where, _INDEX, "name safetensors files of its own folder", repr(name))
        if not (folder / name).is_file():
            raise value_error(where, "path", f"have the file {name} that its index names", "none")
    return [folder / name for name in names]


def _read_object(where: str, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise value_error(where, path.name, "be JSON", f"{error}") from None
    if not isinstance(found, dict):
        raise value_error(where, path.name, "be a JSON object", f"a {type(found).__name__}")
    return found
