"""Read and write tensor files in safetensors format with a checksum. A file is either complete or absent."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.support.errors import missing_extra, type_error, value_error

VERSION = 1
_METADATA_KEY = "saccade"
_RULE = "be a complete and undamaged file of a {}"
_BINARY = getattr(os, "O_BINARY", 0)  # only on Windows
_PIECE = 1 << 24  # bytes of one write


def checked_path(name: str, path: object) -> Path:
    """Return the path of a tensor file. Raise an error unless the argument is a string or a path."""
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if not isinstance(path, str):
        raise type_error(name, "be a string or a path", type(path).__name__)
    return Path(path)


def encoded(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> memoryview:
    """Return the bytes of a tensor file: a header that names and describes the tensors, then the tensors.

    Args:
        tensors: tensors by name, on any device.
        about: the description, as JSON. ``version`` and ``checksum`` are added to it.

    Raises:
        ImportError: safetensors is not installed.
    """
    try:
        from safetensors.torch import save  # noqa: PLC0415  imported when used
    except ModuleNotFoundError:
        raise missing_extra("safetensors", "models") from None
    plain = {name: x.detach().cpu().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
    described = {**about, "version": VERSION}
    described["checksum"] = _checksum(described, plain)
    return memoryview(save(plain, metadata={_METADATA_KEY: json.dumps(described)}))


def write_whole(path: Path, data: memoryview) -> None:
    """Write a file under a temporary name and rename it once it is on disk, so that readers never see a partial file.

    If the process is killed, it leaves behind at most a file ``.NAME.*.part``, which is never read.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
    try:
        try:
            done = 0
            while done < data.nbytes:
                done += os.write(handle, data[done : done + _PIECE])
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def read_tensors(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a file by name, and the description from its header.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: the file is missing, truncated, damaged, or of a different kind or version; the message says why.
    """
    rule = _RULE.format(kind)
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise value_error("path", rule, f"no file at {str(path)!r}") from None
    except PermissionError as error:
        raise value_error("path", rule, f"an unreadable file: {str(path)!r} ({error.strerror})") from None
    return decoded(raw, kind)


def read_plain(path: Path) -> bytes:
    """Return the bytes of a tensor file without following links or waiting for pipes.

    Raises:
        OSError: the file does not exist, is a link, or may not be read.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | _BINARY)
    with open(handle, "rb") as file:
        return file.read()


def decoded(raw: bytes, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Parse the bytes of a tensor file into tensors by name and the description; errors are as for `read_tensors`."""
    try:
        from safetensors import SafetensorError  # noqa: PLC0415  imported when used
        from safetensors.torch import load  # noqa: PLC0415
    except ModuleNotFoundError:
        raise missing_extra("safetensors", "models") from None
    rule = _RULE.format(kind)
    try:
        tensors = load(raw)
    except (SafetensorError, KeyError, ValueError):  # a dtype that torch does not support raises a KeyError
        raise value_error("path", rule, f"a truncated, damaged or foreign file of {len(raw)} bytes") from None
    about = _header_description(raw)
    if about is None:
        raise value_error("path", rule, "a safetensors file that saccade did not write")
    if about.get("version") != VERSION:
        hint = f"this version of saccade reads files of version {VERSION}"
        raise value_error("path", rule, f"a file of version {about.get('version')!r}", hint=hint)
    if about.get("kind") != kind:
        raise value_error("path", rule, f"a file of a {about.get('kind')!r}")
    if not _matches_checksum(about, tensors):
        raise value_error("path", rule, "a damaged file: its checksum does not match")
    return tensors, about


def _header_description(raw: bytes) -> dict[str, Any] | None:
    """Return the description in the header of a tensor file, or None if saccade did not write the file."""
    try:
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        about = json.loads(header["__metadata__"][_METADATA_KEY])
    except (KeyError, TypeError, ValueError, RecursionError):  # deeply nested JSON
        return None
    return about if isinstance(about, dict) else None


def _matches_checksum(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a file's description and tensors match its checksum."""
    try:
        checksum = _checksum({key: x for key, x in about.items() if key != "checksum"}, tensors)
    except RecursionError:
        return False
    return checksum == about.get("checksum")


def _checksum(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    shapes = {name: [str(x.dtype), *x.shape] for name, x in tensors.items()}
    digest = hashlib.sha256(json.dumps([about, shapes], sort_keys=True).encode())
    for _, x in sorted(tensors.items()):
        if x.numel():
            digest.update(x.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Flush a folder to disk where supported, so that the name of a new tensor file survives a crash."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
