"""One weight per channel as bars."""

import builtins
import sys

import numpy as np
import pytest
import torch

from saccade import viz


def bars(figure):
    return figure.axes[0].patches


@pytest.mark.parametrize("make", [np.array, torch.tensor, list, lambda row: torch.tensor(row).bfloat16()])
def test_bars_are_the_weights_in_order(make):
    figure = viz.channel_weights(make([0.25, 1.0, 0.0, 0.5]), title="a $ b")
    assert [bar.get_height() for bar in bars(figure)] == [0.25, 1.0, 0.0, 0.5]
    assert [bar.get_x() + bar.get_width() / 2 for bar in bars(figure)] == pytest.approx([0, 1, 2, 3])
    axes = figure.axes[0]
    assert axes.get_ylim() == (0, 1)
    assert axes.get_title(loc="left") == "a $ b"
    figure.canvas.draw()


def test_higher_bars_are_darker():
    low, high = bars(viz.channel_weights([0.1, 0.9]))
    assert sum(high.get_facecolor()[:3]) < sum(low.get_facecolor()[:3])


def test_signed_weights_hang_from_zero_and_limits_are_the_axis_s():
    negative, positive = bars(viz.channel_weights([-2.0, 3.0]))
    assert (negative.get_y() + negative.get_height(), negative.get_height()) == (-2.0, -2.0)
    assert (positive.get_y(), positive.get_height()) == (0.0, 3.0)
    axes = viz.channel_weights([0.5, 0.6], limits=(0.4, 0.8)).axes[0]
    assert axes.get_ylim() == (0.4, 0.8)
    assert [bar.get_y() for bar in axes.patches] == [0.4, 0.4]


def test_labels_are_text_and_never_mathematics():
    figure = viz.channel_weights([0.5, 0.6], x_labels=["$x^{$", "b"], x_name="$y")
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["$x^{$", "b"]
    assert axes.get_xlabel() == "$y"
    figure.canvas.draw()


def test_both_axes_have_a_name_and_the_same_size_of_numbers():
    for options in ({}, {"x_labels": ["a", "b"]}):
        figure = viz.channel_weights([0.5, 0.6], **options)
        figure.canvas.draw()
        axes = figure.axes[0]
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("channel", "weight")
        sizes = {label.get_fontsize() for axis in (axes.xaxis, axes.yaxis) for label in axis.get_ticklabels()}
        assert len(sizes) == 1
        below, ticks = axes.xaxis.label.get_window_extent(), axes.get_xticklabels()[0].get_window_extent()
        assert below.y1 <= ticks.y0 < ticks.y1 <= axes.get_window_extent().y0  # the bars stand on the axis
    assert viz.channel_weights([0.5], y_name="gate").axes[0].get_ylabel() == "gate"


def test_more_channels_than_pixels_keep_the_largest_of_each_group():
    weights = np.zeros(5000)
    weights[1234] = 1.0
    figure = viz.channel_weights(weights)
    shown = bars(figure)
    assert len(shown) < 1000
    tallest = max(shown, key=lambda bar: bar.get_height())
    assert tallest.get_height() == 1.0
    assert tallest.get_x() <= 1234 <= tallest.get_x() + tallest.get_width()
    assert figure.axes[0].get_xlim() == (-0.5, 4999.5)


def test_nonfinite_values_have_no_bar():
    heights = [bar.get_height() for bar in bars(viz.channel_weights([0.5, float("nan"), float("inf")]))]
    assert heights[0] == 0.5
    assert np.isnan(heights[1:]).all()


@pytest.mark.parametrize(
    ("weights", "options", "sentence"),
    [
        (
            torch.zeros(2, 3),
            {},
            r"channel_weights: weights must be \[channels\]; got shape \[2, 3\].\nHint: gates\[0\]",
        ),
        (0.5, {}, r"weights must be \[channels\]; got shape \[\]"),
        ([], {}, r"weights must have no empty axis"),
        ([float("nan")], {}, r"weights must contain at least one finite number"),
        ([1.0, 2.0], {"x_labels": ["a"]}, r"x_labels must have one label for each of the 2 channels; got 1\."),
        ([1.0, 2.0], {"limits": (1, 0)}, r"limits must be two finite numbers, low < high"),
    ],
)
def test_wrong_values_are_refused(weights, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        viz.channel_weights(weights, **options)


def test_wrong_types_are_refused():
    with pytest.raises(TypeError, match="channel_weights: weights must be real numbers"):
        viz.channel_weights(["a"])
    with pytest.raises(TypeError, match="x_labels must be a list of strings; got one string"):
        viz.channel_weights([0.5], x_labels="a")


def test_a_missing_matplotlib_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    for draw in (lambda: viz.channel_weights([0.5]), lambda: viz.spatial_map([[0.0, 1.0]], [[0.5]])):
        with pytest.raises(ImportError, match=r"matplotlib must be installed; .*\n.*saccade-attention\[viz\]"):
            draw()
