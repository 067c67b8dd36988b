"""Debian's package descriptions: a line and a longer text each, with translations of both.

Written by many people under the licences of their packages; used here to learn from, never shipped.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import fetching

LANGUAGES = {"en": "en", "de": "de", "zh": "zh_CN"}


class Description(NamedTuple):
    """The description of a package: its name, one line, and the paragraphs of the longer text."""

    package: str
    summary: str
    paragraphs: tuple[str, ...]

    @property
    def family(self) -> str:
        """Return the name up to its first hyphen: packages of one family have similar descriptions."""
        return self.package.partition("-")[0]

    @property
    def is_held_out(self) -> bool:
        """Return whether the family of a package is in the test set: one in ten."""
        return hashlib.sha256(self.family.encode()).digest()[0] < 26


def descriptions(folder: Path = fetching.FOLDER / "debian") -> dict[str, dict[str, Description]]:
    """Return descriptions by language and by the MD5 sum of the English text, which translations share.

    Raises:
        SystemExit: this is no Debian, or its lists cannot be downloaded.
    """
    if shutil.which("apt-get") is None:
        raise SystemExit("this example reads the descriptions of Debian's packages, and there is no apt-get here")
    if not list(folder.glob("lists/*_Translation-de*")):
        for own in ("lists/partial", "cache/archives/partial"):
            (folder / own).mkdir(parents=True, exist_ok=True)
        options = {"Acquire::Languages": "en,zh_CN,de", "Dir::State::lists": folder.resolve() / "lists"}
        options |= {"Dir::Cache": folder.resolve() / "cache", "Debug::NoLocking": 1, "APT::Sandbox::User": "root"}
        given = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
        subprocess.run(["apt-get", "update", "--quiet", *given], check=True, stdout=subprocess.DEVNULL)
    return {language: read(folder, name) for language, name in LANGUAGES.items()}


def read(folder: Path, name: str) -> dict[str, Description]:
    """Read the descriptions in one language."""
    found: dict[str, Description] = {}
    for path in sorted((folder / "lists").glob(f"*_Translation-{name.replace('_', '%5f')}*")):
        told = subprocess.run(["/usr/lib/apt/apt-helper", "cat-file", path], check=True, stdout=subprocess.PIPE)
        found |= parsed(told.stdout.decode())
    return found


def parsed(text: str) -> dict[str, Description]:
    """Parse a file of descriptions in apt's format: each starts with its own line and continues indented."""
    found = {}
    for block in text.split("\n\n"):
        lines = block.splitlines()
        told = dict(line.split(": ", 1) for line in lines if re.match(r"[A-Z][\w-]*: ", line))
        start = next((i for i, line in enumerate(lines) if re.match(r"Description-(?!md5)\w+: ", line)), None)
        if start is None:
            continue
        summary = lines[start].split(": ", 1)[1]
        # A single dot means an empty line; deeper indentation is a list, line by line.
        body = "\n".join("" if line.strip() == "." else line[1:] for line in lines[start + 1 :])
        paragraphs = tuple(" ".join(own.split()) for own in re.split(r"\n(?:\n|(?= +[*+-] ))", body) if own.strip())
        found[told["Description-md5"]] = Description(told["Package"], summary, paragraphs)
    return found


def pairs(all_of: Mapping[str, Mapping[str, Description]], language: str) -> list[tuple[Description, Description]]:
    """Return descriptions in English and in ``language``, sorted by name."""
    both = [(own, all_of[language][mark]) for mark, own in all_of["en"].items() if mark in all_of[language]]
    return sorted(both, key=lambda pair: pair[0].package)
