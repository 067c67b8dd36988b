"""The pictures of the documents are drawn by the code, and every page about theory shows one."""

from pathlib import Path

import pytest

from saccade import viz
from saccade.theory.pictures import PICTURES

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
    assert f"](../images/{name}.png)" in page
    assert (DOCS / "images" / f"{name}.png").is_file()
