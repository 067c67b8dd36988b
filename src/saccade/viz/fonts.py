"""Choose fonts for the characters in labels, and escape characters that no font supports."""

import contextlib
import sys
import unicodedata
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from saccade.text import shorten, visible

if TYPE_CHECKING:
    from matplotlib.font_manager import FontProperties

LABEL_WIDTH = 19  # maximum number of columns of a label; a longer label would be wider than the map

# Upright fonts that look good next to Latin text, best first; other installed fonts come after them.
_PREFERRED = (
    "Noto Sans CJK SC",
    "Source Han Sans SC",
    "PingFang SC",
    "Hiragino Sans GB",
    "Microsoft YaHei",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "SimHei",
    "Noto Sans CJK JP",
    "Saccade Han",
    "Noto Sans",
)
# The most common Chinese characters, for machines without a Chinese font; see han/NOTICE.md.
_BUNDLED_FAMILY, _BUNDLED_FILE = "Saccade Han", Path(__file__).parent / "han" / "SaccadeHan-Regular.ttf"
# This font has a box for every character, so every label would seem supported but be unreadable.
_PLACEHOLDER = "Last Resort"
_CJK_NAMES = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO", "IDEOGRAPHIC", "FULLWIDTH")

_Face = tuple[str, str, int]  # family, file, index of the face in the file

_warned = False


class MissingGlyphsWarning(UserWarning):
    """A warning that no installed font supports some character of a label."""


def drawable_labels(labels: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return labels that can be drawn, and the font families to draw them with.

    Invisible characters are escaped and long labels are cut. If no installed font supports a character of a label, the
    label is replaced by its number, counted from 1: ``#4``.

    Warns:
        MissingGlyphsWarning: once per process, naming the characters and a package with a font for them.
    """
    shown = [shorten(visible(label), LABEL_WIDTH) for label in labels]
    families, missing = covering_families(set().union(*shown))
    if missing:
        _warn_once(missing)
        shown = [f"#{i}" if missing & set(label) else label for i, label in enumerate(shown, start=1)]
    return shown, families


def drawable_title(title: str) -> tuple[str, list[str]]:
    """Return a title that can be drawn, and the font families to draw it with.

    Characters that no installed font supports are escaped.
    """
    shown = visible(title)
    families, missing = covering_families(set(shown))
    if missing:
        _warn_once(missing)
    return "".join(ascii(c)[1:-1] if c in missing else c for c in shown), families


def covering_families(characters: Iterable[str]) -> tuple[list[str], set[str]]:
    """Find installed font families that together support all ``characters``.

    Returns:
        The families, the user's default first (matplotlib falls back from one to the next, glyph by glyph), and the
        characters that no installed font supports.

    Cost: opens fonts only until all characters are supported, and each font once per process.
    """
    from matplotlib import font_manager, rcParams  # noqa: PLC0415  matplotlib is optional

    families = list(rcParams["font.family"])
    missing = {character for character in characters if not character.isspace()}
    missing -= _characters_drawn_with(font_manager.FontProperties())
    for search in (_known_faces, _new_faces):
        for name, path, face in search() if missing else ():
            # A family can have many faces, so check the one that matplotlib uses.
            if missing & _characters(path, face):
                covered = missing & _characters_drawn_with(font_manager.FontProperties(family=[name]))
                families += [name] if covered else []
                missing -= covered
            if not missing:
                break
    return families, missing


def _known_faces() -> list[_Face]:
    """Return the font faces that matplotlib knows and the bundled font; the most legible families come first."""
    from matplotlib import font_manager  # noqa: PLC0415  matplotlib is optional

    if all(entry.name != _BUNDLED_FAMILY for entry in font_manager.fontManager.ttflist):
        font_manager.fontManager.addfont(str(_BUNDLED_FILE))
    rank = {name: number for number, name in enumerate(_PREFERRED)}
    faces = [
        (entry.name, entry.fname, getattr(entry, "index", 0))
        for entry in font_manager.fontManager.ttflist
        if not entry.name.startswith(_PLACEHOLDER)
    ]
    return sorted(faces, key=lambda face: (rank.get(face[0], len(rank)), *face))


def _new_faces() -> list[_Face]:
    """Return the font faces that were installed after matplotlib built its list of fonts."""
    from matplotlib import font_manager  # noqa: PLC0415  matplotlib is optional

    before = _known_faces()
    for path in sorted({*font_manager.findSystemFonts()} - {path for _, path, _ in before}):
        # Skip files that are not usable fonts.
        with contextlib.suppress(OSError, RuntimeError, NotImplementedError):
            font_manager.fontManager.addfont(path)
    return [face for face in _known_faces() if face not in before]


def _characters_drawn_with(properties: "FontProperties") -> frozenset[str]:
    from matplotlib import font_manager  # noqa: PLC0415  matplotlib is optional

    path = font_manager.findfont(properties)
    return _characters(str(path), getattr(path, "face_index", 0))


@cache
def _characters(path: str, face: int) -> frozenset[str]:
    """Return the characters that a font face supports. If the font cannot be read, return an empty set."""
    from matplotlib.ft2font import FT2Font  # noqa: PLC0415  matplotlib is optional

    try:
        # Only matplotlib >= 3.11 distinguishes the faces of a collection; older versions read the first.
        font = FT2Font(path, face_index=face) if face else FT2Font(path)
    except (OSError, RuntimeError):
        return frozenset()
    return frozenset(chr(code) for code in font.get_charmap())


def _warn_once(missing: set[str]) -> None:
    global _warned  # noqa: PLW0603  once per process
    if _warned:
        return
    _warned = True
    names = ", ".join(sorted(missing)[:12]) + (" and more" if len(missing) > 12 else "")
    cjk = any(unicodedata.name(character, "").startswith(_CJK_NAMES) for character in missing)
    package, kind = ("fonts-noto-cjk", "any CJK font") if cjk else ("fonts-noto-core", "any font that contains them")
    warnings.warn(
        f"no installed font has {names}: labels with them are drawn as their number. "
        f"Debian and Ubuntu: apt install {package}; elsewhere {kind}.",
        MissingGlyphsWarning,
        stacklevel=_callers_level(),
    )


def _callers_level() -> int:
    """Return the number of stack frames between the font warning and the user's code, as its ``stacklevel``."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "saccade":
        level, frame = level + 1, frame.f_back
    return level
