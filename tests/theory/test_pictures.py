"""The pictures of the documents are drawn by the code, and every page about theory shows one."""

import re
from pathlib import Path

import pytest
from matplotlib.text import Text

from saccade import viz
from saccade.theory.pictures import PICTURES
from saccade.theory.pictures_in_chinese import CHINESE, PICTURES_IN_CHINESE

DOCS = Path(__file__).parents[2] / "docs"


FAST = ("theory-softmax", "theory-relatives", "theory-mistakes")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in PICTURES])
def test_it_is_drawn(name, tmp_path):
    path = viz.save(PICTURES[name](), tmp_path / f"{name}.png")
    assert path.stat().st_size > 5_000


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("name", PICTURES)
def test_its_page_shows_it(name, language):
    page = (DOCS / language / f"{name}.md").read_text(encoding="utf-8")
    path = f"images/zh/{name}.png" if language == "zh" else f"images/{name}.png"
    assert f"](../{path})" in page
    assert (DOCS / path).is_file()


@pytest.mark.ci
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in PICTURES])
def test_it_can_be_read_in_chinese(name):
    figure = PICTURES_IN_CHINESE[name]()
    figure.canvas.draw()
    left = {text.get_text() for text in figure.findobj(Text) if text.get_text() in CHINESE}
    words = {text.get_text() for text in PICTURES[name]().findobj(Text) if re.search("[a-z]{3}", text.get_text())}
    assert left <= set(CHINESE.values())
    assert {word for word in words if "math" not in word} <= CHINESE.keys()
