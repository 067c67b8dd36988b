"""Figures in Chinese: every character has a glyph, none lies on its side, and no name of ours is left in English."""

import inspect
import re
import warnings
from unittest import TestCase

import pytest
import torch
from matplotlib.text import Text

import saccade as sc
from saccade import costs, masks, mechanisms, models, viz
from saccade.distributed import exchange, figures
from saccade.support.language import in_language
from saccade.theory.pictures_in_chinese import PICTURES_IN_CHINESE
from saccade.viz.ticks import stacked

torch.manual_seed(0)
QKV = torch.randn(3, 1, 2, 64, 8)
WEIGHTS = torch.rand(5, 5).softmax(-1)
FIGURES = {
    "heatmap": lambda: viz.heatmap(torch.eye(40) + 0.01, limits=(0, 0.5)),
    "mosaic": lambda: viz.mosaic(torch.rand(2, 3, 4, 4), highlight=(1, 0)),
    "head_grid": lambda: viz.head_grid(torch.rand(2, 3)),
    "profile": lambda: viz.profile(torch.rand(9), baseline=[0.5] * 9, y_name="合多少个查询的全部注意力"),
    "bipartite": lambda: viz.bipartite(WEIGHTS, y_labels=list("12345"), x_labels=list("12345")),
    "channel_weights": lambda: viz.channel_weights(torch.rand(16)),
    "spatial_map": lambda: viz.spatial_map(torch.rand(3, 9, 9), torch.rand(3, 3)),
    "overlay": lambda: viz.overlay(torch.rand(3, 9, 9), {"词": torch.rand(3, 3)}),
    "tradeoff": lambda: viz.tradeoff(sc.compare(*QKV, [mechanisms.Linear()], timed_lengths=[64])),
    "growth": lambda: costs.growth([sc.cost(masks.Causal(), n) for n in (64, 128)], memory=2**20),
    "audit": lambda: sc.audit(models.small_decoder(), length=8).figure(),
    "exchange": lambda: figures.figure(exchange(masks.Causal(), 64, 2, ranks=2)),
    "show": lambda: models.chinese_encoder().show("小狗看见了一只猫", title="标题"),
    "theory": PICTURES_IN_CHINESE["theory-mistakes"],
}


@pytest.fixture(scope="module", params=FIGURES)
def figure(request):
    with in_language("zh"):
        return FIGURES[request.param]()


def test_every_figure_function_is_here():
    functions = {name: getattr(viz, name) for name in viz.__all__ if inspect.isfunction(getattr(viz, name))}
    returned = {name: str(inspect.signature(one).return_annotation).strip("'\"") for name, one in functions.items()}
    assert {name for name, kind in returned.items() if kind == "Figure"} <= FIGURES.keys()


def test_every_character_has_a_glyph(figure):
    with warnings.catch_warnings(), TestCase().assertNoLogs("matplotlib", "WARNING"):  # it logs a font that it replaces
        warnings.simplefilter("error")
        figure.canvas.draw()


def test_no_chinese_lies_on_its_side(figure):
    figure.canvas.draw()
    shown = [text for text in figure.findobj(Text) if re.search("[\u4e00-\u9fff]", text.get_text())]
    assert shown
    assert [text.get_text() for text in shown if text.get_rotation() % 180 == 90] == []


def test_no_name_of_an_axis_is_english(figure):
    names = [name for axes in figure.axes for name in (axes.get_xlabel(), axes.get_ylabel())]
    names += [text.get_text() for text in figure.axes[0].texts]
    assert [name for name in names if re.search("[a-z]{3}", name) and "Linear" not in name] == []


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("查询", ["查", "询"]),
        ("词", ["词"]),
        ("延迟（毫秒）", ["延", "迟", "（毫秒）"]),
        ("第 10 层的 L2 范数", ["第", "10", "层", "的", "L2", "范", "数"]),
        ("weight", ["weight"]),
    ],
)
def test_characters_are_stacked_and_words_stay_whole(name, lines):
    assert stacked(name).splitlines() == lines
    label = viz.heatmap(WEIGHTS, y_name=name).axes[0].yaxis.label
    assert (label.get_text().splitlines(), label.get_rotation()) == (lines, 90 if name == "weight" else 0)


def test_a_stacked_name_covers_no_tick(tmp_path):
    labels = ["electroencephalography", *"abcd"]
    figure = viz.heatmap(WEIGHTS, y_labels=labels, y_name="一个比较长的名称（毫秒）")
    figure.canvas.draw()
    name, *ticks = [figure.axes[0].yaxis.label, *figure.axes[0].get_yticklabels()]
    box = name.get_window_extent()
    assert box.x1 < min(tick.get_window_extent().x0 for tick in ticks)
    assert box.x0 > 0
    assert 0 < box.y0 < box.y1 < figure.bbox.y1
