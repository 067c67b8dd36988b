"""Make labels that are safe to display: escape invisible characters, join lines, and truncate to a width."""

from saccade.support.columns import display_width
from saccade.support.errors import escaped
from saccade.support.validation import check_int

_SIGNS = str.maketrans({"\n": "↵", "\t": "⇥"})


def visible(text: str) -> str:
    r"""Replace invisible characters in a label by escape sequences.

    Control characters can move a terminal's cursor, and direction marks can reorder text, so both are escaped.
    Letters, marks, symbols and the plain space stay.

    Example:
        >>> visible("red\x1b[31m")
        'red\\x1b[31m'
    """
    return escaped(text)


def legible(word: str) -> str:
    r"""Put a label on one line: line breaks become ↵, tabs become ⇥, and the spaces of a blank label become ␣.

    All other characters are treated as in `visible`.

    Example:
        >>> legible("end.\r\n\t")
        'end.↵⇥'
    """
    signs = word.replace("\r\n", "\n").translate(_SIGNS)
    return visible(signs if signs.strip(" ") else signs.replace(" ", "␣"))


def shorten(text: str, width: int) -> str:
    """Truncate a label to at most ``width`` columns, with an ellipsis if anything is cut.

    Args:
        text: a label on one line.
        width: number of columns, at least 1.

    Raises:
        ValueError: ``width < 1``.

    Example:
        >>> shorten("electroencephalography", 9)
        'electroe…'
    """
    check_int("width", width)
    if display_width(text) <= width:
        return text
    shown, used = [], 1
    for character in text:
        used += display_width(character)
        if used > width:
            break
        shown.append(character)
    return "".join(shown) + "…"
