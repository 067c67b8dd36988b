"""Tests of the concordance: every named line runs, commands are parsed, and both languages have the same rows."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import typer

from saccade.cli.app import app
from saccade.theory import CLAIMS, Measurement

ROOT = Path(__file__).parents[3]
PAGES = {language: ROOT / "docs" / language / "concordance.md" for language in ("en", "zh")}


class Row(NamedTuple):
    """A section, or a part of one, and the page's entry for it."""

    number: str
    lines: list[str]
    links: list[str]


class Document(NamedTuple):
    """A tutorial: the stated numbers of sections and parts, and its rows."""

    sections: int
    parts: int
    rows: list[Row]


def read(language):
    """Return the tutorials of a page."""
    text = PAGES[language].read_text(encoding="utf-8")
    documents = []
    for piece in text.split("\n## ")[1:]:
        sections, parts = map(int, re.search(r"^(\d+) \D+(\d+) \D+$", piece, re.MULTILINE).groups())
        rows = []
        for number, told, here in re.findall(r"^\| (\d[\w.]*) \| (.*?) \| (.*) \|$", piece, re.MULTILINE):
            rows.append(Row(number, re.findall(r"`([^`]+)`", here), re.findall(r"\]\(([^)]+)\)", told + here)))
        assert len(rows) == len(re.findall(r"^\| (?=\d)", piece, re.MULTILINE))
        documents.append(Document(sections, parts, rows))
    return documents


ENGLISH = read("en")
LINES = sorted({line for document in ENGLISH for row in document.rows for line in row.lines})
COMMANDS = [line for line in LINES if line.startswith(("saccade ", "python "))]
EXPRESSIONS = [line for line in LINES if line not in COMMANDS]


@pytest.fixture(scope="module")
def prepared():
    """Return the names that the block at the top of the page defines."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGES["en"].read_text(encoding="utf-8"), re.DOTALL)
    names = {}
    exec(compile(block, str(PAGES["en"]), "exec"), names)
    return names


def test_every_section_and_every_part_has_its_row():
    assert len(ENGLISH) == 5
    for document in ENGLISH:
        numbers = [row.number for row in document.rows]
        assert len(set(numbers)) == len(numbers)
        parts = [number for number in numbers if number[-1].isalpha()]
        assert (len(numbers) - len(parts), len(parts)) == (document.sections, document.parts)
        assert {re.sub(r"[a-z]$", "", part) for part in parts} <= set(numbers)


def test_every_row_says_what_runs_or_where_to_read():
    assert all(row.lines or row.links for document in ENGLISH for row in document.rows)


def test_both_languages_have_the_same_rows():
    assert read("zh") == ENGLISH


def test_every_page_that_is_linked_exists():
    links = {link.partition("#")[0] for document in ENGLISH for row in document.rows for link in row.links}
    assert [link for link in sorted(links) if not (ROOT / "docs" / "en" / link).exists()] == []


@pytest.mark.ci
@pytest.mark.parametrize("line", EXPRESSIONS)
def test_named_lines_run(line, prepared):
    result = eval(compile(line, "concordance", "eval"), dict(prepared))
    assert result is not None
    assert result is not False
    measurements = [one for one in result if isinstance(one, Measurement)] if isinstance(result, tuple) else []
    assert [str(one) for one in measurements if not one.agrees] == []
    assert bool(measurements) == line.endswith(".check()")
    if isinstance(result, torch.Tensor):
        assert result.numel() > 0


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_is_one(line):
    program, *words = shlex.split(line)
    if program == "saccade":
        command = typer.main.get_command(app).commands[words[0]]
        asked = command.make_context(words[0], words[1:]).params
        known = {word for claim in CLAIMS for word in (claim.name, claim.topic)}
        assert words[0] != "verify" or set(asked["only"] or ()) <= known
    elif words[0] == "-m":
        assert (ROOT / words[1] / "__main__.py").exists()
        assert all((ROOT / words[1] / f"{word}.py").exists() for word in words[2:])
    else:
        assert (ROOT / words[0]).exists()
