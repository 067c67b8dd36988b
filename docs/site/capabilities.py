"""The tables of capabilities.md, in both languages, generated from the library: ``python docs/site/capabilities.py``.

Masks, mechanisms and caches are those that the library exports, kernels those that it chooses from. A new one is an
error until `answers.examples` has an example of it. The tables depend neither on the machine nor on whether the
compiled kernel is installed: kernels declare what they run; only caches and mechanisms are run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from answers import cache_tables, kernel_tables, mask_tables, mechanism_tables
from answers.examples import missing

DOCS = Path(__file__).parents[1]
LANGUAGES = ("en", "zh")
TABLES: tuple[Callable[[str], str], ...] = (
    *kernel_tables.TABLES,
    *mask_tables.TABLES,
    *mechanism_tables.TABLES,
    *cache_tables.TABLES,
)
"""All tables in the order of the page."""
_TABLE = re.compile(r"^\|.*?\n(?=\n|\Z)", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Write the tables into both pages."""
    for language in LANGUAGES:
        page = DOCS / language / "capabilities.md"
        page.write_text(with_tables(page.read_text(encoding="utf-8"), language), encoding="utf-8")


def with_tables(text: str, language: str) -> str:
    """Return a page with current tables."""
    made = iter(tables(language))
    return _TABLE.sub(lambda _: next(made), text)


def tables(language: str) -> list[str]:
    """Return the tables of a page, in its order."""
    if missing():
        raise ValueError(f"no example in answers/examples.py of: {', '.join(missing())}")
    return [made(language) for made in TABLES]


def tables_in(text: str) -> list[str]:
    """Return the tables that a page contains."""
    return _TABLE.findall(text)


if __name__ == "__main__":
    main()
