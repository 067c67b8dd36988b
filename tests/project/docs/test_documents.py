"""Every document runs: its Python prints what it shows, in both languages, and its links work."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import tokenize
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from tests.sampled import MANY
from typer.testing import CliRunner

from saccade.cli.app import app

ROOT = Path(__file__).parents[3]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PAIRS = [(ROOT / "README.md", ROOT / "README.zh-CN.md")]
PAIRS += [
    (page, ROOT / "docs" / "zh" / page.relative_to(ROOT / "docs" / "en"))
    for page in sorted(ROOT.glob("docs/en/**/*.md"))
]

_FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>[\w-]*)$")
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_IN_CHINESE = "$ saccade --lang zh "
_HIDDEN_TOKENS = (tokenize.COMMENT, tokenize.NL)
_SLOW = ("learning.md", "conformance.md", "audit.md", "theory-trained.md", "approximate.md", "figures.md")


class Block(NamedTuple):
    """A fenced block, its first line, and whether it directly follows the block before it."""

    language: str
    text: str
    line: int
    follows: bool


def blocks_of(text: str) -> list[Block]:
    blocks: list[Block] = []
    fence, language, start, between = "", "", 0, True
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        found = _FENCE.match(line)
        if fence and line == fence:
            blocks.append(Block(language, "".join(f"{own}\n" for own in lines), start, not between))
            fence, between = "", False
        elif fence:
            lines.append(line)
        elif found:
            fence, language, start, lines = found["fence"], found["language"], number + 1, []
        elif line.strip():
            between = True
    assert not fence, f"a block that begins in line {start - 1} does not end"
    return blocks


def said_by(document: Path) -> list[Block]:
    return blocks_of(document.read_text(encoding="utf-8"))


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def with_python() -> list[object]:
    """Return the documents with code; Chinese ones have the code of the English ones, so that one of the two is enough.

    Documents that train or check hundreds of cases take most of a minute; other pages of ``_SLOW`` take many seconds.
    """
    found = [document for document in DOCUMENTS if "```python" in document.read_text("utf-8")]
    chinese = {theirs for _, theirs in PAIRS}
    slow = {own for own in found if own in chinese or own.name in _SLOW}
    return [
        pytest.param(document, id=named(document), marks=[pytest.mark.slow] if document in slow else [])
        for document in found
    ]


def with_commands():
    """Return English documents with commands, and Chinese ones whose commands print Chinese; others print the same."""
    english = [own for own, _ in PAIRS if "```console" in own.read_text("utf-8")]
    chinese = [own for _, own in PAIRS if f"\n{_IN_CHINESE}" in own.read_text("utf-8")]
    return [pytest.param(own, marks=MANY if own in chinese else ()) for own in (*english, *chinese)]


@pytest.fixture
def _threads(document):
    """Use two threads for the README, which states the memory that torch's operations take with two, and one elsewhere.

    If every core runs tests, two threads wait for one another at every small operation, and seconds become minutes.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(2 if document.name.startswith("README") else 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _not_installed(monkeypatch, without_native):
    """Let `explain` say that saccade-cpu is not installed, as for most readers."""
    monkeypatch.setattr("saccade.engine.kernels.native.abilities", lambda: None)


@pytest.mark.ci
@pytest.mark.usefixtures("_threads", "_not_installed")
@pytest.mark.parametrize("document", with_python())
def test_python_prints_what_the_document_shows(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = ModuleType("document")  # as dataclasses want it: found by its name
    monkeypatch.setitem(sys.modules, module.__name__, module)
    blocks = said_by(document)
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        if block.language != "python":
            continue
        # Empty lines in front, so that a traceback names the line of the document.
        code = compile("\n" * (block.line - 1) + block.text, str(document), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, module.__dict__)
        shown = after.text if after is not None and after.follows and after.language == "text" else ""
        assert printed.getvalue() == shown, f"line {block.line} prints something else"


@pytest.mark.ci
@pytest.mark.parametrize("document", with_commands(), ids=named)
def test_commands_print_what_the_document_shows(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for block in said_by(document):
        if block.language != "console":
            continue
        command, _, shown = block.text.partition("\n")
        prompt, program, *arguments = shlex.split(command)
        assert (prompt, program) == ("$", "saccade")
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        # A weight on the edge of rounding may be printed one unit higher on another machine.
        assert _NUMBER.sub("0", _squeezed(result.output)) == _NUMBER.sub("0", _squeezed(shown))
        got, want = (torch.tensor([float(x) for x in _NUMBER.findall(output)]) for output in (result.output, shown))
        torch.testing.assert_close(got, want, atol=1.0, rtol=0.0)


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_links_lead_somewhere(document):
    prose = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = [match["target"].partition("#")[0] for match in _LINK.finditer(prose)]
    local = [target for target in targets if target and not target.startswith(("http://", "https://"))]
    broken = [target for target in local if not (document.parent / target).exists()]
    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_make_targets_exist(document):
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    text = document.read_text(encoding="utf-8")
    used = set(re.findall(r"(?:^|`)make ([a-z0-9-]+)", text, flags=re.MULTILINE))
    assert used <= targets


@pytest.mark.parametrize("english, chinese", PAIRS, ids=[named(english) for english, _ in PAIRS])
def test_both_languages_have_the_same_code(english, chinese):
    ours, theirs = (said_by(page) for page in (english, chinese))
    in_chinese = {block.text.partition("\n")[0] for block in theirs if block.text.startswith(_IN_CHINESE)}
    commands = {command.replace(_IN_CHINESE, "$ saccade ") for command in in_chinese}
    ours, theirs = ([_without_comments(block, in_chinese | commands) for block in blocks] for blocks in (ours, theirs))
    assert ours == theirs


def test_both_languages_have_the_same_pages():
    english, chinese = (
        {page.relative_to(folder) for page in folder.glob("**/*.md")} for folder in (ROOT / "docs/en", ROOT / "docs/zh")
    )
    assert english == chinese
    assert len(english) > 1


def _without_comments(block: Block, translated: set[str]) -> tuple[str, object]:
    """Return the part of a block that must be equal in both languages: the command alone if it is ``translated``."""
    if block.language == "python":
        read = tokenize.generate_tokens(io.StringIO(block.text).readline)
        return block.language, [(token.type, token.string) for token in read if token.type not in _HIDDEN_TOKENS]
    if block.language == "mermaid":  # the same arrows, between words of each language
        return block.language, [re.sub(r'"[^"]*"|: .*', "", line) for line in block.text.splitlines() if ">" in line]
    if block.language == "console" and (command := block.text.partition("\n")[0]) in translated:
        return block.language, command.replace(_IN_CHINESE, "$ saccade ")
    if block.language == "sh":
        return block.language, [line.partition("#")[0].rstrip() for line in block.text.splitlines()]
    return block.language, block.text


def _squeezed(text: str) -> str:
    """Remove trailing spaces and empty lines, which a table has and a document need not have."""
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())
