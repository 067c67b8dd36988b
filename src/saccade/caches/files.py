"""Files of tensors: in safetensors format, whole or not there at all, and known again when they are read."""

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

from saccade.errors import value_error

__all__ = ["VERSION", "encoded", "read_tensors", "write_whole"]

VERSION = 1
_WORD = "saccade"
_PIECE = 1 << 24  # bytes that one write is asked to take
_LARGEST_HEADER = 1 << 26
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def encoded(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> list[memoryview]:
    """A file as pieces of bytes: a header that names and describes the tensors, then the tensors.

    Args:
        tensors: of floats, int64, int8, uint8 or bool, on any device.
        about: JSON; ``version`` and a checksum of everything are added.
    """
    pieces = [_bytes(x) for x in tensors.values()]
    entries: dict[str, Any] = {}
    start = 0
    for (name, x), piece in zip(tensors.items(), pieces, strict=True):
        stop = start + piece.nbytes
        entries[name] = {"dtype": _NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [start, stop]}
        start = stop
    described = {**about, "version": VERSION}
    described["checksum"] = _checksum(described, entries, pieces)
    header = json.dumps({"__metadata__": {_WORD: json.dumps(described)}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    return [memoryview(len(header).to_bytes(8, "little") + header), *pieces]


def write_whole(path: Path, pieces: list[memoryview]) -> None:
    """Write a file beside its place and rename it when it is on the disk: readers find the old one or the new one.

    A process that is killed leaves at most a file ``.NAME.*.part`` behind, which nobody reads.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        try:
            for piece in pieces:
                done = 0
                while done < piece.nbytes:
                    done += os.write(handle, piece[done : done + _PIECE])
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    _sync_folder(path.parent)


def read_tensors(where: str, path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, each in memory of its own, and what is said about them.

    Raises:
        ValueError: no file, one that is truncated or damaged, or not of this kind and version; with the reason.
    """
    rule = f"be a file of a {kind}, whole and undamaged"
    try:
        raw = bytearray(path.read_bytes())
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise value_error(where, "path", rule, f"no file at {str(path)!r}") from None
    entries, about, start = _header(where, rule, raw, kind)
    data = memoryview(raw)[start:]
    end = 0
    for name, entry in entries.items():
        if not _fits(entry) or entry["data_offsets"][0] != end:
            raise value_error(where, "path", rule, f"a damaged header, at {name!r}")
        end = entry["data_offsets"][1]
    if end != len(data):
        what = (
            f"a truncated one, {len(data)} of {end} bytes" if len(data) < end else f"{len(data) - end} bytes too many"
        )
        raise value_error(where, "path", rule, what)
    pieces = [data[slice(*entry["data_offsets"])] for entry in entries.values()]
    if _checksum({k: v for k, v in about.items() if k != "checksum"}, entries, pieces) != about.get("checksum"):
        raise value_error(where, "path", rule, "a damaged one: its checksum does not fit")
    tensors = {}
    for (name, entry), piece in zip(entries.items(), pieces, strict=True):
        x = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]])
        if piece.nbytes:
            x.view(-1).view(torch.uint8).copy_(torch.frombuffer(piece, dtype=torch.uint8))
        tensors[name] = x
    return tensors, about


def _header(where: str, rule: str, raw: bytearray, kind: str) -> tuple[dict[str, Any], dict[str, Any], int]:
    size = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or size > min(len(raw) - 8, _LARGEST_HEADER):
        raise value_error(where, "path", rule, f"a truncated or foreign one of {len(raw)} bytes")
    try:
        header = json.loads(raw[8 : 8 + size])
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        found = header.get("__metadata__", {}).get(_WORD)
        about = None if found is None else json.loads(found)
    except (ValueError, AttributeError):
        raise value_error(where, "path", rule, "a damaged or foreign header") from None
    if not isinstance(about, dict):
        raise value_error(where, "path", rule, "a safetensors file that saccade did not write")
    if about.get("version") != VERSION:
        hint = f"this version of saccade reads files of version {VERSION}"
        raise value_error(where, "path", rule, f"one of version {about.get('version')}", hint=hint)
    if about.get("kind") != kind:
        raise value_error(where, "path", rule, f"one of a {about.get('kind')}")
    return entries, about, 8 + size


def _fits(entry: object) -> bool:
    """Whether an entry describes as many bytes as it takes."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return False
    shape, offsets, dtype = entry["shape"], entry["data_offsets"], _DTYPES.get(str(entry["dtype"]))
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
    if dtype is None or not all(type(n) is int and n >= 0 for n in numbers) or len(offsets) != 2:
        return False
    count = 1
    for n in shape:
        count *= n
    return bool(offsets[1] - offsets[0] == count * dtype.itemsize)


def _bytes(x: Tensor) -> memoryview:
    if not x.numel():
        return memoryview(b"")
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _checksum(about: Mapping[str, Any], entries: Mapping[str, Any], pieces: list[memoryview]) -> str:
    digest = hashlib.sha256(json.dumps([about, entries], sort_keys=True).encode())
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """A new name is on the disk when its folder is; some systems cannot be asked for it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
