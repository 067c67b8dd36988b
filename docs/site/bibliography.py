"""The page of papers, in both languages, from docs/bibliography.bib: ``python docs/site/bibliography.py``.

The file is BibTeX with one field a line; anything else in it is an error, so that nothing is lost unnoticed.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[1]
FILE = DOCS / "bibliography.bib"
HEAD = {
    "en": """# Papers

The {count} papers, books and reports that the docstrings and pages cite, by first author. `docs/bibliography.bib` has
them in BibTeX. [The flow of attention](flow.md#to-read-and-to-watch) suggests which to read first.
""",
    "zh": """# 论文

本库的文档字符串和页面引用的论文、书和报告，按第一作者排列，共 {count} 篇。\
BibTeX 文件是 `docs/bibliography.bib`。建议先读哪些，见[注意力的流程](flow.md#阅读与课程)。
""",
}
OTHERS = {"en": "and others", "zh": "等"}

_BEGIN = re.compile(r"@(?P<kind>\w+)\{(?P<key>\w+),")
_FIELD = re.compile(r"  (?P<name>\w+) = \{(?P<value>.*)\},")
_VENUES = ("booktitle", "journal", "publisher", "howpublished")
_FIELDS = {"author", "title", "year", "eprint", "archiveprefix", "volume", "pages", "edition", "doi", "url", *_VENUES}


class Entry(NamedTuple):
    """A paper: its kind and key in BibTeX, and its fields."""

    kind: str
    key: str
    fields: dict[str, str]

    @property
    def last_name(self) -> str:
        """Last name of the first author, or the name of the team."""
        return self.authors[0].partition(",")[0]

    @property
    def authors(self) -> list[str]:
        """Authors in order, last names first; "others" may be the last."""
        return [author.strip("{}") for author in self.fields["author"].split(" and ")]


def read(text: str) -> list[Entry]:
    """Read all entries of a file, in order."""
    entries: list[Entry] = []
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        begins, field = _BEGIN.fullmatch(line), _FIELD.fullmatch(line)
        if begins and not inside:
            entries.append(Entry(begins["kind"], begins["key"], {}))
            inside = True
        elif field and inside and field["name"] in _FIELDS and field["name"] not in entries[-1].fields:
            value = field["value"].replace("\\&", "&")
            entries[-1].fields[field["name"]] = value[1:-1] if field["name"] == "title" else value
        elif line == "}" and inside:
            inside = False
        elif inside or (line and not line.startswith("%")):
            raise ValueError(f"{FILE.name}, line {number}: no entry, and no field on a line of its own: {line}")
    return entries


def page(entries: Sequence[Entry], language: str) -> str:
    """Return the page in one language."""
    lines = [HEAD[language].format(count=len(entries))]
    for initial, own in groupby(sorted(entries, key=_order), lambda entry: _order(entry)[0][0].upper()):
        lines += [f"## {initial}", "", *(f"- {_told(entry, language)}" for entry in own), ""]
    return "\n".join(lines)


def _order(entry: Entry) -> tuple[str, str, str]:
    last = unicodedata.normalize("NFKD", entry.last_name).casefold().removeprefix("van den ")
    return "".join(filter(str.isalpha, last)), entry.fields["year"], entry.fields["title"].casefold()


def _told(entry: Entry, language: str) -> str:
    fields = entry.fields
    names = [OTHERS[language] if author == "others" else _name(author) for author in entry.authors]
    venue = next((fields[name] for name in _VENUES if name in fields), "")
    places = [venue] if venue else []
    if "eprint" in fields:
        places.append(f"[arXiv:{fields['eprint']}](https://arxiv.org/abs/{fields['eprint']})")
    if "doi" in fields:
        places.append(f"[doi:{fields['doi']}](https://doi.org/{fields['doi']})")
    if "url" in fields:
        places.append(f"<{fields['url']}>")
    title = fields["title"].rstrip(".")
    joined = ", ".join(names).replace(f", {OTHERS[language]}", f" {OTHERS[language]}")
    return f"{joined}: *{title}*. {fields['year']}" + "".join(f". {place}" for place in places)


def _name(author: str) -> str:
    last, _, first = author.partition(", ")
    return f"{first} {last}".strip()


def main() -> None:
    """Write both pages."""
    entries = read(FILE.read_text(encoding="utf-8"))
    for language in ("en", "zh"):
        (DOCS / language / "bibliography.md").write_text(page(entries, language), encoding="utf-8")
    print(f"{len(entries)} entries")


if __name__ == "__main__":
    main()
