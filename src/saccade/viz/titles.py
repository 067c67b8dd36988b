"""Wrap titles without breaking names such as "layer 1, head 3", and abbreviate the names of layers and heads."""

import re
import unicodedata

from saccade.support.columns import display_width
from saccade.support.language import translated

_UNBREAKABLE = re.compile(r"\b(?:layers?|heads?|L|H)\s\d+(?:,\s(?:layers?|heads?|L|H)\s\d+)*", re.IGNORECASE)
_NOT_FIRST = frozenset("，。、；：？！）」』》”’,.;:?!)]}%")  # no line begins with one of these


def wrapped(title: str, columns: int) -> list[str]:
    """Return the lines of a title, each at most ``columns`` wide unless one word is wider.

    Existing line breaks are kept. Lines break at spaces, and between the characters of scripts without spaces.

    Example:
        >>> wrapped("What a word looks at: layer 1, head 3", 30)
        ['What a word looks at:', 'layer 1, head 3']
    """
    return [line for part in title.splitlines() or [""] for line in _filled(part, columns)]


def short_name(**index: int) -> str:
    """Return the short name of a layer, of a head, or of a head in a layer.

    Example:
        >>> short_name(layer=0, head=3)
        'L0 H3'
    """
    names = {"layer": "L{layer}", "head": "H{head}"}
    return " ".join(translated(names[kind], **{kind: number}) for kind, number in index.items())


def _filled(text: str, columns: int) -> list[str]:
    """Break one line of a title into lines of at most ``columns``."""
    lines = [""]
    for piece in _pieces(text):
        if lines[-1] and display_width(lines[-1] + piece.rstrip()) > columns:
            lines[-1] = lines[-1].rstrip()
            lines.append(piece.lstrip())
        else:
            lines[-1] += piece
    return [*lines[:-1], lines[-1].rstrip()]


def _pieces(text: str) -> list[str]:
    """Split a title into pieces between which a line may break; spaces belong to the piece before them."""
    glued = _UNBREAKABLE.sub(lambda match: re.sub(r"\s", "\0", match[0]), text)
    pieces: list[str] = []
    for character in glued:
        is_wide = unicodedata.east_asian_width(character) in ("W", "F")
        before = pieces[-1][-1:] if pieces else ""
        may_break = before == " " or is_wide or (before and unicodedata.east_asian_width(before) in ("W", "F"))
        if not pieces or (may_break and character != " " and character not in _NOT_FIRST):
            pieces.append(character)
        else:
            pieces[-1] += character
    return [piece.replace("\0", " ") for piece in pieces]
