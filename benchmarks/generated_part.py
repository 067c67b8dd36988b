"""The part of a Markdown page that a command generates, between two marker lines."""

from __future__ import annotations

from saccade.support.errors import value_error

_END = "<!-- made until here -->"


def generated(page: str, command: str) -> str:
    """Return the part of a Markdown page that this command generated.

    Raises:
        ValueError: the page has no such part.
    """
    start, stop = _place(page, command)
    return page[start:stop]


def with_generated(page: str, command: str, part: str) -> str:
    """Return a Markdown page with its generated part replaced.

    Raises:
        ValueError: the page has no such part.
    """
    start, stop = _place(page, command)
    return page[:start] + part + page[stop:]


def _place(page: str, command: str) -> tuple[int, int]:
    begin = f"<!-- made by: {command} -->\n\n"
    before, opening, rest = page.partition(begin)
    part, closing, _ = rest.partition(f"\n\n{_END}")
    if not opening or not closing:
        raise value_error("page", f"hold the lines {begin.strip()} and {_END}", "a page without them")
    return len(before + opening), len(before + opening + part)
