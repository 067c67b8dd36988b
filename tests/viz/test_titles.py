"""Titles break where they are full, in any script, and never inside the name of a head."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from saccade import viz
from saccade.support.columns import display_width
from saccade.viz.titles import wrapped

TITLES = [
    "Attention of each word (row) to each word (column): layer 1, head 3",
    "Every head (H) of every layer (L): what each word looks at, in layer 10, head 11, of a model",
    "每个词（行）关注什么（列）：第 1 层第 3 个头，共有十二个头，每个头的颜色从白色到它自己的最大权重。",
    "a" * 70,
    "one",
]


@pytest.mark.parametrize("columns", [12, 20, 40, 60])
@pytest.mark.parametrize("title", TITLES, ids=lambda one: one[:10])
def test_lines_fit_and_hold_everything(title, columns):
    lines = wrapped(title, columns)
    assert "".join("".join(lines).split()) == "".join(title.split())
    for line in lines:
        assert line == line.strip()
        assert display_width(line) <= columns or " " not in line or "layer" in line
    assert not any("layer" in line and "head" not in line for line in lines if "layer 1" in line)


def test_a_line_breaks_only_where_it_is_full():
    assert wrapped("one two three", 40) == ["one two three"]
    assert wrapped("one two three", 7) == ["one two", "three"]
    assert wrapped("in layer 1, head 3", 10) == ["in", "layer 1, head 3"]
    assert wrapped("L0 H10 and more", 8) == ["L0 H10", "and more"]
    assert wrapped("", 10) == [""]


def test_chinese_breaks_between_characters_and_not_before_a_comma():
    assert wrapped("每个词关注什么，逐行画出", 14) == ["每个词关注什", "么，逐行画出"]
    assert wrapped("注意力。", 6) == ["注意", "力。"]


@pytest.mark.parametrize("title", ["A title", "Two\nlines", "A title that is much wider than the map " * 2])
@pytest.mark.parametrize("subtitle", ["layer 2, head 5", "A second line that is much wider than the map " * 3])
@pytest.mark.parametrize("draw", [viz.heatmap, viz.bipartite])
def test_a_subtitle_lies_between_the_title_and_the_map(draw, title, subtitle):
    names = {"x_labels": ["electroencephalography", "b"], "y_labels": ["a", "b"]}
    figure = draw(np.eye(2), title=title, subtitle=subtitle, **names)
    figure.canvas.draw()
    axes = figure.axes[0]
    heading = next(text for text in axes.get_children() if getattr(text, "get_text", str)().startswith(title[:3]))
    (below,) = (text for text in axes.texts if text.get_text().startswith(subtitle[:5]))
    assert below.get_fontsize() < heading.get_fontsize()
    top, bottom = heading.get_window_extent(), below.get_window_extent()
    assert figure.bbox.y1 > top.y1 > top.y0 >= bottom.y1 > bottom.y0 > axes.get_window_extent().y1
    assert bottom.x0 == pytest.approx(top.x0, abs=2)
    assert bottom.x1 < figure.bbox.x1


def test_a_subtitle_may_be_alone():
    axes = viz.heatmap(np.eye(2), subtitle="layer 2, head 5").axes[0]
    assert axes.get_title(loc="left") == "layer 2, head 5"
    assert not axes.texts


def test_line_breaks_of_a_title_are_kept():
    figure = viz.heatmap(np.eye(3), title="A head of a small model\nlayer 1, head 3")
    assert figure.axes[0].get_title(loc="left") == "A head of a small model\nlayer 1, head 3"
    figure.canvas.draw()
    plt.close("all")
