"""The gallery: every figure function is on it, with a few lines of code and a small picture in both languages."""

import inspect
import re
from pathlib import Path

import pytest

from saccade import viz

DOCS = Path(__file__).parents[3] / "docs"
MOST_LINES, MOST_BYTES = 5, 60_000
_FIGURE = re.compile(r"```python\n((?:(?!```).)*?)```\n\n!\[[^]]+\]\(([^)]+)\)", re.DOTALL)


def figures(language):
    """The code of each figure of the page, and the path of the picture below it."""
    text = (DOCS / language / "gallery.md").read_text(encoding="utf-8")
    return [(code, (DOCS / language / picture).resolve()) for code, picture in _FIGURE.findall(text)]


def returns_figure(function):
    return str(inspect.signature(function).return_annotation).strip("'\"") == "Figure"


FUNCTIONS = [
    name for name in viz.__all__ if inspect.isfunction(getattr(viz, name)) and returns_figure(getattr(viz, name))
]


def test_functions_that_draw_are_recognised():
    assert {"heatmap", "overlay", "tradeoff"} <= set(FUNCTIONS)
    assert not {"save", "report", "report_widget"} & set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_figure_function_is_in_the_gallery(name):
    assert [code for code, _ in figures("en") if f"viz.{name}(" in code]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_each_picture_is_that_of_the_lines_above_it(language):
    for code, picture in figures(language):
        saved = re.findall(r'"(gallery-[\w-]+\.png)"', code)
        assert [picture.name] == saved or (not saved and "viz.report(" in code), picture
        assert len(code.splitlines()) <= MOST_LINES, picture


@pytest.mark.parametrize("language", ["en", "zh"])
def test_pictures_are_small(language):
    folder = DOCS / "images" / ("zh" if language == "zh" else "")
    own = {picture for _, picture in figures(language) if picture.parent == folder and "gallery" in picture.name}
    assert own == set(folder.glob("gallery-*.png"))
    assert {picture.name: picture.stat().st_size for picture in own if picture.stat().st_size > MOST_BYTES} == {}
