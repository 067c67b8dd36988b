"""Tests of the list of papers: its pages match the file, and it has every paper that code and pages name, with year."""

import importlib.util
import re
import unicodedata
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"

_ARXIV = re.compile(r"\b(?:\d{4}\.\d{4,5}|(?:math|physics)/\d{7})\b")
_CITED = re.compile(r"arXiv:\s*((?:math|physics)/\d{7}|\d{4}\.\d{4,5})|arxiv\.org/abs/([\w./]*\d)")
_NAMED = re.compile(
    r"(?P<last>[A-Z][\w'-]+)(?: et al\.| and [A-Z][\w-]+| & [A-Z][\w-]+)?,? \(?(?P<year>\d{4})(?: \([^)]*\))?\)?, "
    r"(?:\w+, |\"[^\"]*\", )?\[?(?:arXiv:)?(?P<number>\d{4}\.\d{4,5}|(?:math|physics)/\d{7})"
)
_SEVERAL = re.compile(r"(?P<last>[A-Z][\w'-]+) et al\. \(?(?P<year>(?:19|20)\d{2})\b")


def _script():
    spec = importlib.util.spec_from_file_location("bibliography", DOCS / "site" / "bibliography.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BIBLIOGRAPHY = _script()
ENTRIES = BIBLIOGRAPHY.read(BIBLIOGRAPHY.FILE.read_text(encoding="utf-8"))
NUMBERED = {entry.fields["eprint"]: entry for entry in ENTRIES if "eprint" in entry.fields}


def _spoken(path):
    """Return a file's text on one line, with adjacent strings joined."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = re.sub(r"[\"']\s*\n\s*f?[\"']", "", text)
    return " ".join(text.split())


@pytest.fixture(scope="module")
def texts():
    """Return the texts that may name papers: code, examples and English pages, but not the list itself."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").rglob("*.py"), *(DOCS / "en").glob("*.md")]
    return {str(file.relative_to(ROOT)): _spoken(file) for file in files if file.stem != "bibliography"}


def _letters(name):
    last = unicodedata.normalize("NFKD", name).casefold().split()[-1]
    return "".join(filter(str.isalpha, last))


def _years(entry):
    """Return the years in which a paper was published and first posted."""
    number = entry.fields.get("eprint", "")
    return {entry.fields["year"], f"20{number[:2]}"} if _ARXIV.fullmatch(number) else {entry.fields["year"]}


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_is_that_of_the_file(language):
    hint = "run: python docs/site/bibliography.py"
    page = (DOCS / language / "bibliography.md").read_text(encoding="utf-8")
    assert page == BIBLIOGRAPHY.page(ENTRIES, language), hint
    assert page.count("\n- ") == len(ENTRIES)


def test_every_entry_says_who_what_and_when_and_stands_once():
    assert all({"author", "title", "year"} <= set(entry.fields) for entry in ENTRIES)
    assert [entry.key for entry in ENTRIES] == sorted(entry.key for entry in ENTRIES)
    for names in ([entry.key for entry in ENTRIES], [entry.fields["title"].casefold() for entry in ENTRIES]):
        assert [name for name, times in Counter(names).items() if times > 1] == []
    assert len(NUMBERED) == sum("eprint" in entry.fields for entry in ENTRIES)
    assert [number for number in NUMBERED if not _ARXIV.fullmatch(number)] == []


def test_exactly_the_papers_cited_by_number_have_a_number(texts):
    cited = {}
    for file, text in texts.items():
        for found in _CITED.finditer(text):
            cited.setdefault(found[1] or found[2], []).append(file)
    assert {number: files for number, files in cited.items() if number not in NUMBERED} == {}
    assert sorted(set(NUMBERED) - set(cited)) == []


def test_names_and_years_beside_numbers_are_those_of_the_list(texts):
    named = [(file, found) for file, text in texts.items() for found in _NAMED.finditer(text)]
    assert len(named) > 100
    wrong = []
    for file, found in named:
        entry = NUMBERED[found["number"]]
        if _letters(entry.last_name) != _letters(found["last"]) or found["year"] not in _years(entry):
            wrong.append(f"{file}: {found[0]}; {BIBLIOGRAPHY.FILE.name}: {entry.last_name} {entry.fields['year']}")
    assert wrong == []


def test_papers_named_by_authors_are_in_the_list(texts):
    known = {(_letters(entry.last_name), year) for entry in ENTRIES for year in _years(entry)}
    named = {(found["last"], found["year"], file) for file, text in texts.items() for found in _SEVERAL.finditer(text)}
    assert sorted(one for one in named if (_letters(one[0]), one[1]) not in known) == []


def test_papers_without_number_are_named_somewhere(texts):
    everything = " ".join(texts.values())
    titles = everything.casefold()
    for entry in ENTRIES:
        if "eprint" not in entry.fields and entry.fields["title"].casefold() not in titles:
            named = rf"{re.escape(entry.last_name)}[^.;]{{0,60}}(?:\. )?[^.;]{{0,30}}{entry.fields['year']}"
            assert re.search(named, everything), entry.key


@pytest.mark.parametrize(
    "line", ["@misc{a,\n  author = {A},", "@misc{a,\n  pages = 3,\n}", "@misc{a,\n  notes = {b},\n}", "words"]
)
def test_a_wrong_entry_is_refused(line):
    if line.endswith("},"):
        line += "\n@misc{b,"
    with pytest.raises(ValueError, match="no entry, and no field on a line of its own"):
        BIBLIOGRAPHY.read(line)
