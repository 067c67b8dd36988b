"""The width of text in terminal columns, and padding of text to a width."""

import unicodedata


def display_width(text: str) -> int:
    """Return the width of text in terminal columns: 2 for a Chinese character and most emoji, 0 for combining marks."""
    return sum(_columns(character) for character in text)


def left_aligned(text: str, width: int) -> str:
    """Pad text with spaces on the right to a width in terminal columns.

    >>> left_aligned("窗口", 6) + "|"
    '窗口  |'
    """
    return text + " " * (width - display_width(text))


def right_aligned(text: str, width: int) -> str:
    """Pad text with spaces on the left to a width in terminal columns."""
    return " " * (width - display_width(text)) + text


def _columns(character: str) -> int:
    if unicodedata.category(character) in {"Mn", "Me", "Cf"}:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
