"""The language of figures, reports and the command line: English, or Chinese on request."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Literal

from saccade.support.argument_hints import argument_hints
from saccade.support.validation import check_choice

Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")

_FILES = (
    "chinese.toml",
    "chinese_reports.toml",
    "chinese_claims.toml",
    "chinese_measurements.toml",
    "chinese_laws.toml",
)
_current: ContextVar[Language] = ContextVar("language", default="en")


@argument_hints({})
def set_language(language: Language) -> None:
    """Set the language of the text in figures, reports and the command line. The default is English.

    Titles and names that you pass are drawn unchanged, except default axis names such as "key". Error messages are
    always in English.

    Args:
        language: "en" or "zh".

    Raises:
        ValueError: the language is not supported.

    Example:
        >>> set_language("zh")
        >>> translated("key")
        '键'
        >>> set_language("en")
        >>> translated("key")
        'key'
    """
    check_choice("language", language, LANGUAGES)
    _current.set(language)


def current_language() -> Language:
    """Return the language of printed reports and figures."""
    return _current.get()


@contextmanager
def in_language(language: Language) -> Iterator[None]:
    """Set the language within a ``with`` block."""
    before = current_language()
    set_language(language)
    try:
        yield
    finally:
        _current.set(before)


def language_of(environment: Mapping[str, str]) -> Language:
    """Return the language selected by the first of LC_ALL, LC_MESSAGES and LANG that is set.

    >>> language_of({"LANG": "zh_CN.UTF-8"}), language_of({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"})
    ('zh', 'en')
    """
    wanted = next((environment[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if environment.get(name)), "")
    return "zh" if wanted.lower().startswith("zh") else "en"


def translated(words: str, /, **values: object) -> str:
    """Return text in the current language, with each ``{name}`` replaced by its value.

    The template of a `Message` is translated, and so are its values if they are messages. Text without a translation
    stays English. Line breaks count as spaces.
    """
    if isinstance(words, Message):
        values = {name: translated(x) if isinstance(x, Message) else x for name, x in words.values.items()}
        return translated(words.words, **values)
    text = words if current_language() == "en" else chinese().get(one_line(words), words)
    return text.format(**values) if values else text


class Message(str):
    """English text that `translated` can translate later, because it stores its template and its values.

    >>> reason = Message("at most {most:,.1f} MiB per rank", most=3)
    >>> with in_language("zh"):
    ...     print(reason, translated(reason))
    at most 3.0 MiB per rank 每个设备最多 3.0 MiB
    """

    words: str
    values: Mapping[str, object]

    def __new__(cls, words: str, /, **values: object) -> Message:
        """Format an English template with values. A message without new values is returned unchanged."""
        if isinstance(words, Message) and not values:
            return words
        message = super().__new__(cls, words.format(**values) if values else words)
        message.words, message.values = words, values
        return message


def one_line(words: str) -> str:
    """Replace line breaks and indentation by single spaces. Text without line breaks is returned unchanged."""
    return " ".join(words.split()) if "\n" in words else words


def joined(parts: Iterable[str], words: str = "{first}; {others}") -> Message:
    """Join messages into one, separated by semicolons unless ``words`` is a different template. Skip empty parts."""
    first, *others = [Message(part) for part in parts if part] or [Message("")]
    return Message(words, first=first, others=joined(others, words)) if others else first


@cache
def chinese() -> Mapping[str, str]:
    """Return a mapping from English texts to their Chinese translations."""
    files = (Path(__file__).parent / name for name in _FILES)
    tables = [table for file in files for table in tomllib.loads(file.read_text(encoding="utf-8")).values()]
    return {english: words for table in tables for english, words in table.items()}
