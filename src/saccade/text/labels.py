"""Make untrusted text safe to display: nothing invisible, nothing endless."""

import unicodedata

from saccade.support.errors import escaped
from saccade.support.validation import check_int

_SIGNS = str.maketrans({"\n": "↵", "\t": "⇥"})


def visible(text: str) -> str:
    r"""Write every character that would not be seen as its escape.

    Control characters can move a terminal's cursor and direction marks can reorder what is read, so neither
    is shown as it is. Letters, marks, symbols and the plain space stay.

    Example:
        >>> visible("red\x1b[31m")
        'red\\x1b[31m'
    """
    return escaped(text)


def legible(word: str) -> str:
    r"""Write a word on one line: line breaks as ↵, tabs as ⇥, spaces that stand alone as ␣, the rest as `visible` does.

    Example:
        >>> legible("end.\r\n\t")
        'end.↵⇥'
    """
    signs = word.replace("\r\n", "\n").translate(_SIGNS)
    return visible(signs if signs.strip(" ") else signs.replace(" ", "␣"))


def display_width(text: str) -> int:
    """Count columns as a terminal does: Chinese and most emoji take two, combining marks none."""
    return sum(_columns(character) for character in text)


def shorten(text: str, width: int) -> str:
    """Cut ``text`` to at most ``width`` columns and end it with an ellipsis where something was cut.

    Args:
        text: one line.
        width: at least 1.

    Raises:
        ValueError: ``width < 1``.

    Example:
        >>> shorten("electroencephalography", 9)
        'electroe…'
    """
    check_int("width", width)
    if display_width(text) <= width:
        return text
    kept, used = [], 1
    for character in text:
        used += _columns(character)
        if used > width:
            break
        kept.append(character)
    return "".join(kept) + "…"


def _columns(character: str) -> int:
    if unicodedata.category(character) in {"Mn", "Me", "Cf"}:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
