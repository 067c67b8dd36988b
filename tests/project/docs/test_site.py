"""The site: its table of contents, its pairs of pages, its diagrams; and, slowly, all of it built."""

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from html import unescape
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"


def script(name):
    """A script of docs/site as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / "site" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILD, PAIRS = script("build"), script("pairs")


def test_every_page_is_in_the_table_of_contents_once():
    made = ("api/index", "decisions/index")
    listed = Counter(page for part in BUILD.parts() for page in part["pages"] if page not in made)
    for language in ("en", "zh"):
        pages = {path.stem for path in (DOCS / language).glob("*.md")} - {"index"}
        notebooks = {f"notebooks/{path.stem}" for path in (DOCS / language).glob("notebooks/*.ipynb")}
        assert dict(listed) == dict.fromkeys(pages | notebooks, 1)


def test_no_page_has_changed_in_one_language_alone():
    hint = "read the pair beside one another, then run: python docs/site/pairs.py"
    assert PAIRS.marks() == PAIRS.recorded(), hint


def test_a_page_that_changes_alone_is_found():
    old = {"a": ["1", "2"], "b": ["1", "2"], "c": ["1", "2"]}
    assert PAIRS.changed_alone(old, {"a": ["1", "2"], "b": ["9", "2"], "c": ["9", "9"], "d": ["1", "1"]}) == ["b"]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_diagrams_are_those_of_the_page(language):
    diagrams = re.findall(r"```mermaid\n(.*?)```", (DOCS / language / "flow.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(diagrams) == len(list((DOCS / "images").glob(f"flow-*-{language}.svg")))
    for number, diagram in enumerate(diagrams, 1):
        drawn = unescape((DOCS / "images" / f"flow-{number}-{language}.svg").read_text(encoding="utf-8"))
        drawn = re.sub(r"\s", "", re.sub(r"<[^>]*>", "", drawn))
        labels = re.findall(r'"([^"]+)"', diagram) or re.findall(r": (.+)", diagram)
        assert labels
        for label in labels:
            for line in label.split("<br/>"):
                assert re.sub(r"\s", "", unescape(line)) in drawn, (number, line)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_asks_no_other_host(tmp_path):
    pytest.importorskip("furo", reason="needs pip install 'saccade-attention[site]'")
    subprocess.run([sys.executable, str(DOCS / "site" / "build.py"), str(tmp_path / "site")], check=True)
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 2 * 100
    assert (tmp_path / "site" / "zh" / "api" / "saccade.masks.html").exists()
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(
            r'<(?:script|img|iframe)[^>]+src="([^"]+)"|<link[^>]+rel="stylesheet"[^>]+href="([^"]+)"', text
        )
        assert not [one for pair in loaded for one in pair if one.startswith(("http", "//"))], page
        scripts = re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
        assert not [one for one in scripts if "http:" in one or "https:" in one], page
        other = {"en": "zh", "zh": "en"}.get(page.relative_to(tmp_path / "site").parts[0])
        if other:
            assert re.search(rf'href="[./]+{other}/[^"]+" lang="{other}"', text), page
