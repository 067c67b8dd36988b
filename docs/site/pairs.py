"""Record that pages and notebooks agree in both languages: ``python docs/site/pairs.py``.

Keeps a hash of each page of docs/en and docs/zh in pairs.json, and exits with an error if one page of a pair has
changed and the other has not. The hash of a notebook covers its cells, not their outputs. ``--alone masks`` declares
that the change of masks.md needs no counterpart in the other language, such as a spelling mistake. A test fails until
the hashes are current.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1]
FILE = Path(__file__).with_name("pairs.json")
Marks = dict[str, list[str]]


def marks() -> Marks:
    """Return the hashes of the current pages: ``{name: [English, Chinese]}``."""
    english = DOCS / "en"
    names = sorted(
        path.relative_to(english)
        for kind in ("*.md", "recipes/*.md", "notebooks/*.ipynb")
        for path in english.glob(kind)
    )
    return {
        name.with_suffix("").as_posix(): [_mark(DOCS / language / name) for language in ("en", "zh")] for name in names
    }


def recorded() -> Marks:
    """Return the recorded hashes."""
    found: Marks = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    return found


def changed_alone(old: Marks, new: Marks) -> list[str]:
    """Return the pages that have changed in one language and not in the other."""
    return [name for name in new if name in old and (new[name][0] == old[name][0]) != (new[name][1] == old[name][1])]


def main(allowed: list[str]) -> None:
    """Record the hashes, unless a page has changed in one language alone."""
    new = marks()
    alone = [name for name in changed_alone(recorded(), new) if name not in allowed]
    if alone:
        sys.exit(f"changed in one language alone: {', '.join(alone)}")
    FILE.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")


def _mark(path: Path) -> str:
    content = path.read_bytes()
    if path.suffix == ".ipynb":
        cells = json.loads(content)["cells"]
        content = json.dumps([[cell["cell_type"], "".join(cell["source"])] for cell in cells]).encode()
    return hashlib.sha256(content).hexdigest()[:16]


if __name__ == "__main__":
    main([argument for argument in sys.argv[1:] if argument != "--alone"])
