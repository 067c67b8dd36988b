"""BlockFolder: a folder of block files with a limited total size, shared by several processes."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from saccade.caches.files.tensor_files import read_plain, write_whole
from saccade.support.errors import value_error

_STALE_AFTER = 3600.0  # seconds after which an unfinished file is assumed to be left over from a dead process
_FOLDER_ERRORS = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENOTEMPTY),
    errno.ENXIO,
}
_BLOCK = re.compile(r"[0-9a-f]{64}\.block")
_UNFINISHED = re.compile(r"\.[0-9a-f]{64}\.block\.[0-9a-f]{16}\.part")


class _File(NamedTuple):
    path: Path
    size: int
    used: int


class BlockFolder:
    """A folder of blocks. Each block is a file named after its key, and is either complete or absent.

    The folder reads, counts and removes only files that it could have written itself. Links are never followed.

    Args:
        folder: created if it does not exist.
        max_bytes: largest total size of the files.

    Raises:
        ValueError: the path may not be read or written, or is not an ordinary folder.
    """

    def __init__(self, folder: Path, max_bytes: int):
        self._folder, self._max_bytes = folder, max_bytes
        with _explain_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def nbytes(self) -> int:
        """Total size of the block files in bytes."""
        return sum(file.size for file in self._files())

    def path(self, key: str) -> Path:
        """Return the path of a block's file."""
        return self._folder / key[:2] / f"{key}.block"

    def has(self, key: str) -> bool:
        """Return whether a block has a file; links and files in linked folders do not count."""
        path = self.path(key)
        try:
            return stat.S_ISDIR(os.lstat(path.parent).st_mode) and stat.S_ISREG(os.lstat(path).st_mode)
        except OSError:
            return False

    def read(self, key: str) -> bytes | None:
        """Return the contents of a block's file, or None if it is missing or unreadable."""
        try:
            return read_plain(self.path(key)) if self.has(key) else None
        except OSError:
            return None

    def remove(self, key: str) -> None:
        """Remove the file of a damaged block, if that is permitted."""
        _try_remove(self.path(key))

    def touch(self, keys: Sequence[str]) -> None:
        """Mark the blocks of a sequence as just used. Later blocks get older times, so they are removed first."""
        now = time.time_ns()
        for i, key in enumerate(keys):
            if self.has(key):
                with contextlib.suppress(OSError):
                    os.utime(self.path(key), ns=(now - 1000 * i, now - 1000 * i))

    def write(self, key: str, data: memoryview, protected: set[str]) -> bool:
        """Write a block file, removing the least recently used blocks if necessary. Return whether there was room.

        Args:
            key, data: the key and contents of the block.
            protected: keys of blocks that must not be removed.
        """
        with self._locked():
            files = self._files()
            free_bytes = self._max_bytes - data.nbytes - sum(file.size for file in files)
            for file in sorted(files, key=lambda file: file.used):
                if free_bytes < 0 and file.path.stem not in protected and _try_remove(file.path):
                    free_bytes += file.size
            if free_bytes < 0:
                return False
            path = self.path(key)
            with _explain_errors(path):
                path.parent.mkdir(exist_ok=True)
                if path.parent.is_symlink():
                    raise NotADirectoryError(errno.ENOTDIR, "a link, which is not followed")
                write_whole(path, data)
        return True

    def clear(self) -> None:
        """Remove all block files. If some files may not be removed, remove the rest and raise an error."""
        with self._locked():
            left = [file.path for file in self._files() if not _try_remove(file.path)]
        if left:
            rule = "be a folder whose blocks may be removed"
            raise value_error("folder", rule, f"{len(left)} that may not be removed, such as {left[0]}")

    def _files(self) -> list[_File]:
        """Return all files that count against the size limit of the folder: blocks and unfinished blocks."""
        with _explain_errors(self._folder):
            folders = [Path(entry.path) for entry in _entries(self._folder) if entry.is_dir(follow_symlinks=False)]
        files: list[_File] = []
        for folder in folders:
            if re.fullmatch(r"[0-9a-f]{2}", folder.name):
                with contextlib.suppress(OSError):  # another process may have removed it, or it belongs to another user
                    files += [file for entry in _entries(folder) if (file := _as_file(entry)) is not None]
        return files

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Context manager that holds the folder's lock while files are removed and written.

        If the process dies, the operating system releases the lock.
        """
        try:
            import fcntl  # noqa: PLC0415  not on every system
        except ModuleNotFoundError:
            # Without the lock, two processes together may briefly exceed max_bytes. Nothing else depends on it.
            yield
            return
        lock_path = self._folder / "lock"
        with _explain_errors(lock_path):
            handle = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _try_remove(path: Path) -> bool:
    """Try to remove a block file. Return whether the file is gone."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def _as_file(entry: os.DirEntry[str]) -> _File | None:
    """Return a folder entry's path, size and time of last use, or None if it is not a file of the block store."""
    is_unfinished = _UNFINISHED.fullmatch(entry.name) is not None
    if not (is_unfinished or _BLOCK.fullmatch(entry.name)) or not entry.is_file(follow_symlinks=False):
        return None
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:  # it was removed meanwhile
        return None
    path = Path(entry.path)
    is_stale = is_unfinished and time.time() - status.st_mtime > _STALE_AFTER and _try_remove(path)
    return None if is_stale else _File(path, status.st_size, status.st_mtime_ns)


@contextlib.contextmanager
def _explain_errors(path: Path) -> Iterator[None]:
    """Context manager that converts an OSError about the block folder to a ValueError.

    It does not convert other errors, such as those of a full or broken disk.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FOLDER_ERRORS:
            raise
        rule = "be a folder that this process can read and write and that contains only blocks"
        raise value_error("folder", rule, f"{error.strerror} at {path}") from None
