"""The part of a Markdown page that a command makes, between two lines that say so."""

from __future__ import annotations

from saccade.support.errors import value_error

__all__ = ["generated", "with_generated"]

_END = "<!-- made until here -->"


def generated(page: str, command: str) -> str:
    """The part of a page that this command made.

    Raises:
        ValueError: the page has no such part.
    """
    start, stop = _place(page, command)
    return page[start:stop]


def with_generated(page: str, command: str, made: str) -> str:
    """A page with that part made anew.

    Raises:
        ValueError: the page has no such part.
    """
    start, stop = _place(page, command)
    return page[:start] + made + page[stop:]


def _place(page: str, command: str) -> tuple[int, int]:
    begin = f"<!-- made by: {command} -->\n\n"
    before, found, rest = page.partition(begin)
    made, ends, _ = rest.partition(f"\n\n{_END}")
    if not found or not ends:
        raise value_error("page", f"hold the lines {begin.strip()} and {_END}", "a page without them")
    return len(before + found), len(before + found + made)
