"""Fonts made for the tests, so that they pass whatever is installed."""

from pathlib import Path

import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager

from saccade.viz import fonts


def _make_font(path: Path, family: str, characters: str) -> Path:
    """Write a font in which every character of ``characters`` is a filled square."""
    names = {ord(character): f"uni{ord(character):04X}" for character in characters}
    order = [".notdef", *names.values()]
    pen = TTGlyphPen(None)
    pen.moveTo((50, 0))
    for corner in ((50, 800), (900, 800), (900, 0)):
        pen.lineTo(corner)
    pen.closePath()
    square = pen.glyph()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder(order)
    builder.setupCharacterMap(names)
    builder.setupGlyf(dict.fromkeys(order, square))
    builder.setupHorizontalMetrics(dict.fromkeys(order, (1000, 50)))
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({"familyName": family, "styleName": "Regular"})
    builder.setupOS2(usWeightClass=400)
    builder.setupPost()
    builder.save(path)
    return path


@pytest.fixture
def make_font():
    return _make_font


@pytest.fixture
def only_bundled_fonts(monkeypatch):
    """Leave only the fonts that come with matplotlib, with no warning given yet."""
    bundled = [entry for entry in font_manager.fontManager.ttflist if "mpl-data" in entry.fname]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", bundled)
    monkeypatch.setattr(font_manager, "findSystemFonts", list)
    monkeypatch.setattr(fonts, "_warned", False)
    return bundled
