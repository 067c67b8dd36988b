"""Labels are readable whichever fonts are installed."""

import warnings

import numpy as np
import pytest
from matplotlib import font_manager
from tests.viz.han_font import wanted

from saccade import viz
from saccade.viz.fonts import MissingGlyphsWarning, covering_families, drawable_labels, drawable_title

WORDS = ["[CLS]", "龘狗", "saw", "看靐"]  # two that our own font leaves out


def test_without_a_font_labels_become_numbers_and_one_warning_helps(only_bundled_fonts):
    with pytest.warns(MissingGlyphsWarning) as told:
        labels, _ = drawable_labels(WORDS)
    assert labels == ["[CLS]", "#2", "saw", "#4"]
    assert len(told) == 1
    assert "no installed font has 靐, 龘" in str(told[0].message)
    assert "apt install fonts-noto-cjk" in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert drawable_labels(WORDS)[0] == labels
        assert drawable_title("龘 saw") == (r"\u9f98 saw", ["sans-serif"])


def test_the_warning_points_at_the_callers_line(only_bundled_fonts):
    with pytest.warns(MissingGlyphsWarning) as told:
        viz.heatmap([[1.0]], x_labels=["龘"])
    assert told[0].filename == __file__


def test_another_script_is_helped_with_another_package(only_bundled_fonts):
    with pytest.warns(MissingGlyphsWarning, match="fonts-noto-core; elsewhere any font that contains them"):
        assert drawable_labels(["\U00011680"])[0] == ["#1"]


def test_chinese_is_drawn_where_no_chinese_font_is_installed(only_bundled_fonts):
    words = ["小狗", "看见", "了", "一只", "猫", "，", "信息", "熵"]
    figure = viz.heatmap(np.eye(len(words)), x_labels=words, y_labels=words, title="每个词看什么")
    figure.canvas.draw()  # a glyph that is missing would warn here, and warnings are errors
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == words
    assert covering_families("小狗saw") == (["sans-serif", "Saccade Han"], set())


def test_our_own_font_has_what_its_notice_says(only_bundled_fonts):
    assert len([character for character in wanted() if character >= "一"]) >= 3755
    assert covering_families(wanted())[1] == set()


def test_an_installed_font_is_preferred_to_our_own(only_bundled_fonts, make_font, tmp_path):
    font_manager.fontManager.addfont(make_font(tmp_path / "sc.ttf", "Noto Sans CJK SC", "小狗"))
    assert covering_families("小狗") == (["sans-serif", "Noto Sans CJK SC"], set())


def test_a_font_that_covers_the_label_is_found_and_drawn_with(only_bundled_fonts, make_font, tmp_path):
    font_manager.fontManager.addfont(make_font(tmp_path / "han.ttf", "Test Han", "龘靐"))
    assert covering_families("龘靐saw") == (["sans-serif", "Test Han"], set())
    figure = viz.heatmap([[1.0, 2.0]], x_labels=["龘靐", "saw"])
    figure.canvas.draw()
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["龘靐", "saw"]


def test_several_fonts_together_cover(only_bundled_fonts, make_font, tmp_path):
    for family, characters in (("Test A", "龘"), ("Test B", "靐"), ("Test C", "x")):
        font_manager.fontManager.addfont(make_font(tmp_path / f"{family}.ttf", family, characters))
    assert covering_families("龘靐") == (["sans-serif", "Test A", "Test B"], set())


def test_a_font_installed_since_matplotlib_looked_is_found(only_bundled_fonts, make_font, tmp_path, monkeypatch):
    font = make_font(tmp_path / "late.ttf", "Test Late", "龘")
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [str(tmp_path / "broken.ttf"), str(font)])
    assert covering_families("龘") == (["sans-serif", "Test Late"], set())


def test_the_placeholder_font_covers_nothing(only_bundled_fonts):
    assert any(entry.name.startswith("Last Resort") for entry in only_bundled_fonts)
    assert covering_families("龘a") == (["sans-serif"], {"龘"})


def test_nothing_is_opened_when_the_default_covers(only_bundled_fonts, monkeypatch):
    monkeypatch.setattr(viz.fonts, "_known_faces", lambda: pytest.fail("searched without need"))
    assert covering_families("naïve … [SEP] $x^{$") == (["sans-serif"], set())


def test_invisible_characters_are_escaped_and_long_labels_cut():
    assert drawable_labels(["a\nb", "electroencephalography", "x" * 500])[0] == [
        r"a\nb",
        "electroencephalogr…",
        "x" * 18 + "…",
    ]
