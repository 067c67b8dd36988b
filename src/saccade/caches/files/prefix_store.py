"""PrefixStore: keys and values of texts that begin alike, kept in a folder and shared by prompts and processes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.arguments import integer
from saccade.caches.cache import LayerCache
from saccade.caches.files.tensor_files import VERSION, checked_path, decoded, encoded, read_plain, write_whole
from saccade.caches.kv_cache import KVCache
from saccade.caches.model_cache import Cache
from saccade.errors import type_error, unsupported, value_error

__all__ = ["PrefixStore"]

_KIND = "block of a prefix"
_OLD = 3600.0  # seconds after which an unfinished file belongs to a process that is gone
_IN_THE_WAY = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENOTEMPTY),
    errno.ENXIO,
}
_BLOCK = re.compile(r"[0-9a-f]{64}\.block")
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\.block\.[0-9a-f]{16}\.part")


class PrefixStore:
    """A folder of keys and values, block by block, for prompts that begin like earlier ones.

    A text is cut into blocks of ``block_size`` tokens. Each block has a file, named by a hash of its tokens, of all
    blocks before it and of everything else that keys and values depend on: the model's `fingerprint`, the ``salt``
    and the format. So a block is found only where the whole text up to its end is the same, and never for another
    model. What is read is checked byte by byte, and the tokens are compared; a damaged file counts as missing and is
    removed. One that may not be read counts as missing.

    Any number of processes may use a folder, and any of them may be killed at any time: files appear whole. When
    ``max_bytes`` would be exceeded, the blocks that were not used for longest go, ends of texts before beginnings.

    Only files that the store could have written are read, counted and removed. A link is never followed, whatever it
    stands in place of: what lies outside of the folder stays as it is.

    Args:
        folder: made if there is none. Nothing but the store should write there.
        max_bytes: most bytes that the files may take.
        fingerprint: of the model, from `fingerprint`.
        block_size: tokens in a block.
        salt: whatever else changes keys and values and is no part of the model: autocast, an adapter that a flag
            switches, an image before the text; or a user who must not share with others.

    Raises:
        TypeError, ValueError: arguments that do not fit; a folder that may not be written to, or in which something
            stands that is none of the store's.

    Cost: a file of ``layers * kv_heads * block_size * (head_dim + value_dim)`` elements for each block, read once.

    Example:
        >>> import tempfile
        >>> from saccade import caches, models
        >>> config = models.DecoderConfig(
        ...     vocab_size=9, max_len=64, embed_dim=8, num_heads=2, num_layers=1, feed_forward_dim=8
        ... )
        >>> model = models.Decoder(config).eval()
        >>> store = PrefixStore(tempfile.mkdtemp(), 1 << 20, fingerprint=caches.fingerprint(model), block_size=4)
        >>> text, cache = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2], model.new_cache()
        >>> first = models.generate(model, [text], 3, cache=cache)
        >>> store.put(text, cache)
        2
        >>> again = model.new_cache()
        >>> known = store.restore(text, again)
        >>> known, models.generate(model, [text[known:]], 3, cache=again) == first
        (8, True)

    Reference: the chain of hashes is that of vLLM's automatic prefix caching; Kwon et al. 2023, arXiv:2309.06180.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_bytes: int,
        *,
        fingerprint: str,
        block_size: int = 64,
        salt: str = "",
    ):
        where = "PrefixStore"
        place = checked_path(where, "folder", folder)
        for name, text in (("fingerprint", fingerprint), ("salt", salt)):
            if not isinstance(text, str):
                hint = "caches.fingerprint(model)" if name == "fingerprint" else None
                raise type_error(where, name, "be a string", type(text).__name__, hint=hint)
        if not fingerprint:
            raise value_error(where, "fingerprint", "name a model", "''", hint="caches.fingerprint(model)")
        self.folder, self.max_bytes = place, integer(where, "max_bytes", max_bytes)
        self.block_size = integer(where, "block_size", block_size)
        self.fingerprint, self.salt = fingerprint, salt
        with _said(where, self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        root = json.dumps([VERSION, fingerprint, salt, block_size])
        self._root = hashlib.sha256(root.encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes that the files take, those of other models and salts in the folder included."""
        return sum(file.size for file in self._files())

    def find(self, tokens: Sequence[int]) -> int:
        """How many tokens at the beginning of a text are there: files are looked for, not read."""
        chain = self._chain("PrefixStore.find", tokens)
        return self.block_size * next((i for i, key in enumerate(chain) if not self._is_there(key)), len(chain))

    def restore(self, tokens: Sequence[int], cache: Cache | LayerCache, *, device: torch.device | str = "cpu") -> int:
        """Fill an empty cache with the beginning of a text, as far as it is known.

        Args:
            tokens: of one text.
            cache: an empty cache of a `KVCache` or `saccade.caches.BlockSelectCache` for each layer, batch of one.
            device: where the model is.

        Returns:
            How many tokens the cache now holds, at most all but the last: that one is to be read, since what comes
            after it is asked. Read on with the others, ``tokens[returned:]``.

        Raises:
            ValueError, UnsupportedError: the cache is not empty, or of a kind that cannot be filled.
        """
        where = "PrefixStore.restore"
        layers = _layers(where, cache)
        if any(layer.length for layer in layers):
            raise value_error(where, "cache", "be empty", f"one of {layers[0].length} columns", hint="crop(0)")
        chain = self._chain(where, tokens)
        parts: list[list[Tensor]] = []
        for i, key in enumerate(chain[: max(0, len(tokens) - 1) // self.block_size]):
            part = self._block(key, list(tokens[i * self.block_size : (i + 1) * self.block_size]), len(layers))
            if part is None or (parts and any(map(_differ, part, parts[0]))):
                break
            parts.append(part)
        if not parts:
            return 0
        self._touch(chain[: len(parts)])
        for i, layer in enumerate(layers):
            keys, values = (torch.cat([part[2 * i + which] for part in parts], 2).to(device) for which in (0, 1))
            layer.fill(keys, values)
        return len(parts) * self.block_size

    def put(self, tokens: Sequence[int], cache: Cache | LayerCache) -> int:
        """Keep the full blocks of a text that a cache has read.

        Args:
            tokens: of the text; the cache holds them first, and may hold more.
            cache: a `KVCache` or `saccade.caches.BlockSelectCache` for each layer, batch of one, whose tokens stand at
                0, 1, 2, …

        Returns:
            Blocks that were written: those that were not there, as far as what the cache holds is exact. Keys made
            after a step that left blocks out are not kept, nor what would not fit in ``max_bytes``.

        Raises:
            ValueError, UnsupportedError: a cache of another kind, or of other tokens.
        """
        where = "PrefixStore.put"
        layers = _layers(where, cache)
        chain = self._chain(where, tokens)
        held = layers[0].length
        if held < len(tokens):
            raise value_error(where, "tokens", f"be held by the cache, at most {held}", len(tokens))
        for layer in layers:
            if not isinstance(layer.kv_positions, range) or layer.kv_positions != range(layer.length):
                raise value_error(where, "cache", "hold tokens at 0, 1, 2, …", "others", hint="one text, unpadded")
            if layer.key is None or len(layer.key) != 1:
                got = 0 if layer.key is None else len(layer.key)
                raise value_error(
                    where, "cache", "hold a batch of one", got, hint="reorder([b]) of a fork keeps item b"
                )
        exact = min(layer.exact_len for layer in layers)
        written, known = 0, 0
        for i, key in enumerate(chain[: exact // self.block_size]):
            span = slice(i * self.block_size, (i + 1) * self.block_size)
            if not self._is_there(key):
                tensors = {}
                for number, layer in enumerate(layers):
                    assert layer.key is not None
                    assert layer.value is not None
                    tensors[f"{number}.key"] = layer.key[:, :, span]
                    tensors[f"{number}.value"] = layer.value[:, :, span]
                about = {"kind": _KIND, "key": key, "tokens": list(tokens[span])}
                if not self._write(key, encoded("PrefixStore", tensors, about), set(chain[: i + 1])):
                    break
                written += 1
            known = i + 1
        self._touch(chain[:known])
        return written

    def clear(self) -> None:
        """Remove all blocks of the folder, whatever model they are of.

        Raises:
            ValueError: some may not be removed; the others are.
        """
        with self._locked("PrefixStore.clear"):
            left = [file.path for file in self._files() if not self._remove(file.path)]
        if left:
            rule = "be a folder whose blocks may be removed"
            raise value_error("PrefixStore.clear", "folder", rule, f"{len(left)} that may not, such as {left[0]}")

    def __repr__(self) -> str:
        return f"PrefixStore({str(self.folder)!r}, {self.max_bytes}, block_size={self.block_size})"

    def _chain(self, where: str, tokens: Sequence[int]) -> list[str]:
        """The keys of the full blocks of a text."""
        given = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
        if not is_list or not all(type(token) is int for token in given):
            raise type_error(where, "tokens", "be the tokens of one text, a list of ints", type(tokens).__name__)
        key, chain = self._root, []
        for start in range(0, len(given) - self.block_size + 1, self.block_size):
            block = json.dumps([key, list(given[start : start + self.block_size])])
            key = hashlib.sha256(block.encode()).hexdigest()
            chain.append(key)
        return chain

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.block"

    def _block(self, key: str, tokens: list[int], layers: int) -> list[Tensor] | None:
        """Keys and values of each layer; None if there are none, or none that can be trusted."""
        path = self._path(key)
        if not self._is_there(key):
            return None
        try:
            raw = read_plain(path)
        except OSError:  # it went meanwhile, or is another user's: missing, and not ours to remove
            return None
        try:
            tensors, about = decoded("PrefixStore", raw, _KIND)
        except ValueError:
            self._remove(path)
            return None
        names = [f"{i}.{which}" for i in range(layers) for which in ("key", "value")]
        is_it = about.get("key") == key and about.get("tokens") == tokens and set(tensors) == set(names)
        found = [tensors[name] for name in names] if is_it else []
        if not found or not all(self._fits(*pair) for pair in zip(found[::2], found[1::2], strict=True)):
            self._remove(path)
            return None
        return found

    def _fits(self, key: Tensor, value: Tensor) -> bool:
        """Whether these can be keys and values of a block."""
        is_alike = key.dim() == value.dim() == 4 and key.shape[:3] == value.shape[:3] and key.dtype == value.dtype
        return is_alike and key.is_floating_point() and (len(key), key.shape[2]) == (1, self.block_size)

    def _is_there(self, key: str) -> bool:
        """Whether a block has a file; a link, or a file in a folder that is one, is none of ours."""
        path = self._path(key)
        try:
            return stat.S_ISDIR(os.lstat(path.parent).st_mode) and stat.S_ISREG(os.lstat(path).st_mode)
        except OSError:
            return False

    def _remove(self, path: Path) -> bool:
        """Remove a file that was found to be ours; whether it is gone."""
        try:
            path.unlink(missing_ok=True)
        except OSError:
            return False
        return True

    def _touch(self, chain: list[str]) -> None:
        """Say that blocks were used now; the end of a text a little earlier, so that it goes before the beginning."""
        now = time.time_ns()
        for i, key in enumerate(chain):
            if self._is_there(key):
                with contextlib.suppress(OSError):
                    os.utime(self._path(key), ns=(now - 1000 * i, now - 1000 * i))

    def _write(self, key: str, data: memoryview, kept: set[str]) -> bool:
        """Write a block when there is room, or room can be made of blocks that are not of this text."""
        size, where = data.nbytes, "PrefixStore.put"
        with self._locked(where):
            files = self._files()
            spare = self.max_bytes - size - sum(file.size for file in files)
            for file in sorted(files, key=lambda file: file.used):
                if spare >= 0:
                    break
                if file.path.stem not in kept and self._remove(file.path):
                    spare += file.size
            if spare < 0:
                return False
            path = self._path(key)
            with _said(where, path):
                path.parent.mkdir(exist_ok=True)
                if path.parent.is_symlink():
                    raise NotADirectoryError(errno.ENOTDIR, "a link, which is not followed")
                write_whole(path, data)
        return True

    def _files(self) -> list[_File]:
        """All files that count: blocks, and unfinished ones."""
        found = []
        with _said("PrefixStore", self.folder):
            folders = [Path(entry.path) for entry in _entries(self.folder) if entry.is_dir(follow_symlinks=False)]
        for folder in folders:
            if not re.fullmatch(r"[0-9a-f]{2}", folder.name):
                continue
            with contextlib.suppress(OSError):  # another process may have removed it, or it is another user's
                for entry in _entries(folder):
                    found += self._counted(Path(entry.path), entry)
        return found

    def _counted(self, path: Path, entry: os.DirEntry[str]) -> list[_File]:
        """The file, if it is one that counts."""
        is_unfinished = _UNFINISHED.fullmatch(path.name) is not None
        if not (is_unfinished or _BLOCK.fullmatch(path.name)) or not entry.is_file(follow_symlinks=False):
            return []
        try:
            told = entry.stat(follow_symlinks=False)
        except OSError:  # it went meanwhile
            return []
        if is_unfinished and time.time() - told.st_mtime > _OLD and self._remove(path):
            return []
        return [_File(path, told.st_size, told.st_mtime_ns)]

    @contextlib.contextmanager
    def _locked(self, where: str) -> Iterator[None]:
        """One process at a time makes room and writes; the system ends the lock of a process that is killed."""
        try:
            import fcntl  # noqa: PLC0415  not on every system
        except ModuleNotFoundError:
            # Without it two processes may together exceed max_bytes for a moment; nothing else depends on the lock.
            yield
            return
        place = self.folder / "lock"
        with _said(where, place):
            handle = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


class _File(NamedTuple):
    path: Path
    size: int
    used: int


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether blocks cannot be those of one text: their widths or types are others."""
    return one.shape != other.shape or one.dtype != other.dtype


@contextlib.contextmanager
def _said(where: str, path: Path) -> Iterator[None]:
    """Put in a sentence what stands in the way at a place; a full or broken disk stays an OSError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _IN_THE_WAY:
            raise
        rule = "be a folder that this process may read and write, with nothing but blocks in it"
        raise value_error(where, "folder", rule, f"{error.strerror} at {path}") from None


def _layers(where: str, cache: Cache | LayerCache) -> list[KVCache]:
    if not isinstance(cache, Cache | LayerCache):
        raise type_error(where, "cache", "be a cache", type(cache).__name__)
    found: list[KVCache] = []
    for layer in cache.flat if isinstance(cache, Cache) else (cache,):
        if not isinstance(layer, KVCache):
            reason = f"a {type(layer).__name__} does not hold the keys of all tokens"
            raise unsupported(where, "PrefixStore", [reason], hint="KVCache and BlockSelectCache do")
        found.append(layer)
    return found
