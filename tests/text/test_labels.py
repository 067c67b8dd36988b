"""Labels show everything and end somewhere."""

import pytest

from saccade.support.columns import display_width
from saccade.text import shorten, visible
from saccade.text.labels import legible


@pytest.mark.parametrize(
    "text, expected",
    [
        ("cat", "cat"),
        ("[/red] $x^{$", "[/red] $x^{$"),
        ("小狗 e\u0301", "小狗 e\u0301"),
        ("\x1b[31m\n\t\x00", r"\x1b[31m\n\t\x00"),
        ("\u202egnp", r"\u202egnp"),
        ("a\u00a0b\u2028", r"a\xa0b\u2028"),
        ("\ud800", r"\ud800"),
        ("می\u200cخواهم", "می\u200cخواهم"),
    ],
)
def test_invisible_characters_are_escaped(text, expected):
    assert visible(text) == expected


@pytest.mark.parametrize(
    "word, expected",
    [
        ("cat", "cat"),
        (".\n", ".↵"),
        ("\r\n\r\n", "↵↵"),
        ("a\tb", "a⇥b"),
        ("   ", "␣␣␣"),
        ("New York", "New York"),
        ("", ""),
        ("\n\x1b[31m\r", r"↵\x1b[31m\r"),
    ],
)
def test_a_word_is_legible_on_one_line(word, expected):
    assert legible(word) == expected


@pytest.mark.parametrize(
    "text, width, expected",
    [
        ("cat", 3, "cat"),
        ("cats", 3, "ca…"),
        ("小狗看见", 5, "小狗…"),
        ("小狗看见", 8, "小狗看见"),
        ("小狗", 1, "…"),
        ("", 1, ""),
    ],
)
def test_labels_are_cut_by_columns(text, width, expected):
    assert shorten(text, width) == expected
    assert display_width(shorten(text, width)) <= width


def test_no_width_is_refused():
    with pytest.raises(ValueError, match="shorten: width must be an int of at least 1; got 0"):
        shorten("cat", 0)
