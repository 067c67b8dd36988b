"""Grids of heads, profiles, and lines between two texts."""

import numpy as np
import pytest
import torch

from saccade import viz


def names(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def sheet(figure):
    return np.asarray(figure.axes[0].images[0].get_array())


def test_a_grid_has_a_cell_for_each_head():
    values = torch.zeros(2, 3)
    values[1, 2] = 1.0
    figure = viz.head_grid({"entropy": values}, title="One $ grid")
    assert names(figure) == ["0", "1", "entropy", "L0", "L1", "H0", "H1", "H2"]
    pixels = sheet(figure)
    is_shown = (pixels != 1.0).any(-1)
    bar = np.flatnonzero(is_shown.any(0))[-10:]  # the bar is the last thing on the sheet
    top, bottom = np.flatnonzero(is_shown[:, bar].any(-1))[[0, -1]]
    dark = np.argwhere(pixels[:, : bar[0]].max(-1) < 0.1)
    first, last = dark.min(0), dark.max(0)
    assert (last - first < 51).all()  # one cell: three of them are as wide as the name
    light = np.argwhere(is_shown[:, : bar[0]])
    assert np.abs(light.max(0) - last).max() <= 1  # the last row, the last column
    assert 200 < len(dark) < 51 * 51
    np.testing.assert_allclose(pixels[top, bar], pixels[tuple(dark[0])][None].repeat(10, 0))
    assert bottom - top + 1 == pytest.approx(np.ptp(light[:, 0]), abs=2)
    assert (np.diff(pixels[top:bottom, bar[0]].sum(-1)) >= 0).all()  # from dark to light
    figure.canvas.draw()


def ends(figure):
    """The numbers beside the bars of all grids, from below, by name."""
    texts = [text for text in names(figure) if text[:1] not in "LH" or len(text) > 3]
    return {name: (low, high) for low, high, name in zip(*[iter(texts)] * 3, strict=True)}


def test_grids_have_their_own_scales_unless_shared():
    values = {"a": np.eye(3), "b": np.eye(3) / 100}
    own, shared = viz.head_grid(values), viz.head_grid(values, shared_scale=True)
    assert ends(own) == {"a": ("0", "1"), "b": ("0", "0.01")}
    assert ends(shared) == {"a": ("0", "1"), "b": ("0", "1")}
    assert ends(viz.head_grid(values, limits=(0, 2))) == {"a": ("0", "2"), "b": ("0", "2")}
    cells = [(sheet(figure).max(-1) < 0.1).sum() for figure in (own, shared)]
    assert cells[0] > 1.5 * cells[1]
    assert viz.head_grid(np.eye(40)).axes[0].texts[3].get_text() == "L0"


def test_nearly_even_grids_are_drawn_from_their_least_number_on_and_signed_ones_around_0():
    values = {"even": 5.0 + np.eye(3) / 10, "signed": np.eye(3) - 0.25}
    figure = viz.head_grid(values)
    assert ends(figure) == {"even": ("5", "5.1"), "signed": ("-0.75", "0.75")}
    blue = sheet(figure)
    assert ((blue[..., 2] - blue[..., 0]) > 0.1).any()


def test_grids_fill_their_rows():
    figure = viz.head_grid({f"grid {number}": np.eye(12) for number in range(4)})
    tops = {text.get_text(): text.get_position() for text in figure.axes[0].texts}
    assert tops["grid 0"][1] == tops["grid 1"][1] < tops["grid 2"][1] == tops["grid 3"][1]


def test_a_profile_loses_no_peak():
    values = np.zeros((2, 100_000))
    values[1, 77_777] = 5.0
    axes = viz.profile(values, names=["a", "b$"], baseline=np.ones(100_000), title="T").axes[0]
    line = axes.lines[1]
    assert len(line.get_xdata()) <= 1000
    assert line.get_ydata().max() == 5.0
    assert line.get_xdata()[line.get_ydata().argmax()] == pytest.approx(77_777, rel=2e-3)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b$", "uniform attention"]
    assert axes.lines[2].get_linestyle() == "--"


def test_a_line_below_an_equal_one_stays_visible():
    line = np.linspace(1.0, 2.0, 50)
    lines = viz.profile([line, 3 * line, 1.01 * line], names=["below", "apart", "above"]).axes[0].get_lines()
    below, apart, above = (one.get_linewidth() for one in lines)
    assert below > apart == above


def test_a_profile_counts_places_as_they_are_given():
    axes = viz.profile([1.0, 2.0, 3.0], x=torch.tensor([-1, 0, 4]), x_name="lag", y_name="share").axes[0]
    assert list(axes.lines[0].get_xdata()) == [-1, 0, 4]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("lag", "share")
    assert axes.get_legend() is None
    log = viz.profile([1.0, 2.0, 3.0], x=[-1, 1, 4], log=True).axes[0]
    assert list(log.lines[0].get_xdata()) == [1, 4]
    assert log.get_yscale() == "log"


def test_lines_go_from_each_query_to_what_it_looks_at():
    weights = [[0.9, 0.06, 0.04], [0.0, 0.0, 1.0]]
    figure = viz.bipartite(weights, y_labels=["who", "$x^{$"], x_labels=["a", "b", "c"], title="T")
    assert names(figure) == ["who", "$x^{$", "a", "b", "c", "query", "key"]
    (lines,) = figure.axes[0].collections
    ends = [(float(line[0][1]), float(line[1][1])) for line in lines.get_segments()]
    assert ends == [(1.0, 1.5), (1.0, 0.5), (2.0, 2.5)]  # the weakest first; the shorter text in the middle
    widths = lines.get_linewidths()
    assert widths[0] < widths[1] < widths[2]
    figure.canvas.draw()
    box, size = figure.get_tightbbox(), figure.get_size_inches()
    assert 0 <= box.x0 < box.x1 <= size[0]
    assert 0 <= box.y0 < box.y1 <= size[1]


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_every_figure_is_written_in_every_format(ending, tmp_path):
    figures = (
        viz.head_grid(np.eye(3)),
        viz.profile([1.0, 2.0]),
        viz.bipartite(np.eye(2), y_labels=["a", "b"], x_labels=["c", "d"]),
        viz.heatmap(np.eye(3), log=True),
    )
    for number, figure in enumerate(figures):
        assert viz.save(figure, tmp_path / f"{number}.{ending}").stat().st_size > 1000


E2 = np.eye(2)


@pytest.mark.parametrize(
    "draw, error, message",
    [
        (lambda: viz.head_grid({}), ValueError, "head_grid: values must contain at least one grid; got none"),
        (lambda: viz.head_grid({"a": E2, "b": np.eye(3)}), ValueError, "head_grid: values must all be of one shape"),
        (lambda: viz.head_grid({1: E2}), TypeError, "head_grid: values must have names that are strings; got int"),
        (lambda: viz.head_grid([1.0]), ValueError, r"head_grid: values must be \[layers, heads\]; got shape \[1\]"),
        (lambda: viz.profile(np.ones((9, 2))), ValueError, "profile: values must have at most 8 lines; got 9"),
        (lambda: viz.profile(np.ones((1, 0))), ValueError, r"profile: values must be \[points\] or \[lines, points\]"),
        (lambda: viz.profile([1.0], names="a"), TypeError, "profile: names must be a list of strings; got one string"),
        (
            lambda: viz.profile([1.0], names=[]),
            ValueError,
            "profile: names must have one label for each of the 1 lines; got 0",
        ),
        (lambda: viz.profile([1.0, 2], x=[1]), ValueError, "profile: x must have one number for each of the 2 points"),
        (lambda: viz.profile([1.0, 2], x=[1, 1]), ValueError, "profile: x must increase; got values that do not"),
        (lambda: viz.profile([1.0, 2], baseline=[1]), ValueError, "profile: baseline must have one number for each"),
        (
            lambda: viz.profile([0.0, 0.0], log=True),
            ValueError,
            "profile: values must contain a number to show; got none",
        ),
        (
            lambda: viz.bipartite(np.ones((81, 2)), y_labels=["a"] * 81, x_labels=["b"] * 2),
            ValueError,
            r"bipartite: weights must have at most 80 rows and columns; got \[81, 2\]",
        ),
        (
            lambda: viz.bipartite(E2, y_labels=["a"], x_labels=["b", "c"]),
            ValueError,
            "bipartite: y_labels must have one label for each of the 2 queries; got 1",
        ),
        (
            lambda: viz.bipartite(E2, y_labels="ab", x_labels=["b", "c"]),
            TypeError,
            "bipartite: y_labels must be a list of strings; got one string",
        ),
        (
            lambda: viz.bipartite(E2, y_labels=["a", "b"], x_labels=["b", "c"], least=0.0),
            ValueError,
            "bipartite: least must be a finite number above 0 and below 1; got 0.0",
        ),
    ],
)
def test_bad_arguments_are_named(draw, error, message):
    with pytest.raises(error, match=message):
        draw()
