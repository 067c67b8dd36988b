"""Tables and cells of a page."""

from __future__ import annotations

from answers.words import WORDS


def table(*rows: tuple[str, ...]) -> str:
    """Return a table of its head and its rows."""
    first, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([first, "|---" * len(rows[0]) + "|", *rest]) + "\n"


def code(text: str) -> str:
    """Return a name as code, in a cell."""
    return f"`{text}`".replace("|", "\\|")


def joined(names: list[str], language: str) -> str:
    """Names as code, one after the other."""
    return WORDS[language]["and"].join(code(name) for name in names) or WORDS[language]["none"]


def all_but(names: list[str], every: list[str], language: str) -> str:
    """Return the items named, or all but them, whichever list is shorter."""
    others = [one for one in every if one not in names]
    if len(others) < len(names):
        words = WORDS[language]
        return words["but"].format(joined(others, language)) if others else words["all"]
    return joined(names, language)
