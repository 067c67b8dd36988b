"""Tests of figures with the maps of all heads."""

import numpy as np
import pytest
import torch
from matplotlib.text import Annotation

from saccade import viz
from saccade.support.language import in_language


def names(figure):
    return [text.get_text() for text in figure.axes[0].texts if not isinstance(text, Annotation)]


def titles(figure):
    """Return the title and the subtitle."""
    (below,) = (text.get_text() for text in figure.axes[0].texts if isinstance(text, Annotation))
    return figure.axes[0].get_title(loc="left"), below.replace("\n", " ")


def sheet(figure):
    return np.asarray(figure.axes[0].images[0].get_array())


def dark(figure):
    """Return the number of pixels at the dark end of the scale."""
    return int((sheet(figure).max(-1) < 0.1).sum())


def test_every_map_has_its_name():
    figure = viz.mosaic(torch.rand(2, 3, 4, 4))
    assert names(figure) == ["L0 H0", "L0 H1", "L0 H2", "L1 H0", "L1 H1", "L1 H2"]
    assert names(viz.mosaic(torch.rand(5, 4, 4))) == ["H0", "H1", "H2", "H3", "H4"]
    rows = [text.get_position()[1] for text in figure.axes[0].texts]
    assert rows[0] == rows[2] < rows[3] == rows[5]


def test_each_map_has_its_own_scale_unless_shared():
    maps = np.stack([np.eye(4), np.eye(4) / 100])
    own, shared = viz.mosaic(maps), viz.mosaic(maps, shared_scale=True)
    assert dark(own) == 2 * dark(shared) > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "Each map has its own colour scale, "),
        ({"shared_scale": True}, "All maps share one colour scale, "),
        ({"log": True}, "Each map has its own logarithmic colour scale: "),
        ({"log": True, "shared_scale": True}, "All maps share one logarithmic colour scale: "),
    ],
)
def test_the_figure_says_what_it_shows_and_how_it_is_scaled(options, words):
    layers, heads = torch.rand(2, 3, 4, 4), torch.rand(3, 4, 4)
    for weights, title in ((layers, "Every head (H) of every layer (L)"), (heads, "Every head (H)")):
        assert titles(viz.mosaic(weights, **options))[0] == title
        own, scale = titles(viz.mosaic(weights, title="Mine", **options))
        assert own == "Mine"
        assert scale.startswith(words)
    assert viz.mosaic(heads, title="", **options).axes[0].get_title(loc="left").startswith(words[:20])


def test_names_of_heads_are_chinese_too():
    with in_language("zh"):
        mosaic, grid = viz.mosaic(torch.rand(2, 2, 4, 4)), viz.head_grid(torch.rand(2, 2))
        assert names(mosaic) == ["层0 头0", "层0 头1", "层1 头0", "层1 头1"]
        assert names(grid)[-4:] == ["层0", "层1", "头0", "头1"]
        title, scale = titles(mosaic)
        assert title == "所有层的所有头"
        assert scale.startswith("每张小图各用各的颜色标度：从 0 到")


def test_one_bright_cell_of_many_stays_visible():
    maps = np.zeros((1, 2000, 2000), np.float32)
    maps[0, 777, 1999] = 1
    assert dark(viz.mosaic(maps)) == 1


def test_the_chosen_map_is_framed():
    maps = np.zeros((2, 2, 3, 3))
    maps[..., 0, 0] = 1
    plain, framed = viz.mosaic(maps), viz.mosaic(maps, highlight=(1, 0), title="Every head of every layer")
    weights = [text.get_weight() for text in framed.axes[0].texts if not isinstance(text, Annotation)]
    assert weights == ["normal", "normal", "bold", "normal"]
    changed = np.argwhere((sheet(plain) != sheet(framed)).any(-1))
    height, width = sheet(plain).shape[:2]
    assert len(changed) > 0
    assert changed[:, 0].min() > height / 2 - 10
    assert changed[:, 1].max() < width / 2 + 10


def test_maps_that_hold_nothing_finite_are_grey_beside_the_others():
    maps = np.stack([np.eye(3), np.full((3, 3), np.nan)])
    viz.mosaic(maps).canvas.draw()
    assert dark(viz.mosaic(maps)) > 0


def test_flat_and_tall_maps_keep_their_shape():
    tall, flat = sheet(viz.mosaic(np.ones((1, 30, 10)))), sheet(viz.mosaic(np.ones((1, 10, 30))))
    assert tall.shape[0] > 1.5 * tall.shape[1]
    assert flat.shape[1] > 1.5 * flat.shape[0]


@pytest.mark.parametrize(
    "weights, options, message",
    [
        (np.eye(3), {}, r"mosaic: weights must be \[heads, q_len, kv_len\] or .*; got shape \[3, 3\]"),
        (np.ones((0, 3, 3)), {}, r"mosaic: weights must have no empty axis; got shape \[0, 3, 3\]"),
        (
            np.ones((2, 3, 3)),
            {"highlight": (2,)},
            r"mosaic: highlight must be \(head,\) below \(2,\); got \(2,\)",
        ),
        (np.ones((2, 3, 3)), {"highlight": (0, 1)}, r"mosaic: highlight must be \(head,\)"),
        (
            np.ones((2, 2, 3, 3)),
            {"highlight": (0, -1)},
            r"mosaic: highlight must be \(layer, head\) below \(2, 2\)",
        ),
    ],
)
def test_bad_values_are_named(weights, options, message):
    with pytest.raises(ValueError, match=message):
        viz.mosaic(weights, **options)
