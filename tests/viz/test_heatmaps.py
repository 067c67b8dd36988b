"""One matrix as a picture."""

import builtins
import itertools
import sys

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt

import saccade as sc
from saccade import masks, mechanisms, viz
from saccade.matrix import GradientMatrix
from saccade.viz.canvas import colours

WORDS = ["[CLS]", "The", "cat", "$x^{$", "[SEP]"]


def pixels(figure):
    """The map's pixels, brightness 0 to 1, top row first."""
    figure.canvas.draw()
    picture = np.asarray(figure.canvas.buffer_rgba())[..., :3].mean(-1) / 255
    box = figure.axes[0].get_window_extent()
    top, left = round(picture.shape[0] - box.y1), round(box.x0)
    return picture[top : top + round(box.height), left : left + round(box.width)]


def texts(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def test_labels_stand_at_their_rows_and_columns():
    figure = viz.heatmap(torch.rand(2, 5), x_labels=WORDS, y_labels=["a", "b"], title="a $ b")
    axes = figure.axes[0]
    assert texts(axes.xaxis) == WORDS
    assert texts(axes.yaxis) == ["a", "b"]
    assert list(axes.get_xticks()) == [0, 1, 2, 3, 4]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("key", "query")
    assert axes.get_title(loc="left") == "a $ b"
    assert axes.get_ylim() == (1.5, -0.5)
    figure.canvas.draw()


@pytest.mark.parametrize("make", [np.array, torch.tensor, list, lambda rows: torch.tensor(rows).bfloat16()])
def test_any_matrix_is_drawn(make):
    image = viz.heatmap(make([[0.0, 1.0, 0.5], [0.25, 0.0, 0.0]])).axes[0].images[0]
    np.testing.assert_array_equal(image.get_array(), [[0.0, 1.0, 0.5], [0.25, 0.0, 0.0]])


def test_whole_numbers_truth_values_and_tracked_gradients_are_drawn():
    for weights in (torch.eye(2, dtype=torch.bool), np.eye(2, dtype=int), torch.eye(2, requires_grad=True)):
        np.testing.assert_array_equal(viz.heatmap(weights).axes[0].images[0].get_array(), np.eye(2))


def test_rows_are_queries_from_the_top():
    shown = pixels(viz.heatmap([[0.0, 1.0], [0.0, 0.0]]))
    height, width = shown.shape
    assert shown[height // 4, 3 * width // 4] < 0.05
    assert shown[3 * height // 4, width // 4] > 0.95


def lightness_contrast(ink, rgb):
    """The contrast of black (0) or white (1) text with a colour by APCA 0.1.9, from 0 to about 106."""
    luminance = rgb**2.4 @ (0.2126729, 0.7151522, 0.0721750)
    text, cell = (y + max(0.022 - y, 0.0) ** 1.414 for y in (ink, luminance))
    return 114 * abs(cell**0.56 - text**0.57 if cell > text else cell**0.65 - text**0.62) - 2.7


@pytest.mark.parametrize("low", [0, -1], ids=["weights", "of both signs"])
def test_annotation_is_readable_on_every_cell(low):
    """WCAG 2 alone would write black on dark red, where white is easier to read."""
    matrix = np.linspace(low, 1, 400).reshape(20, 20)
    axes = viz.heatmap(matrix, annotate=True).axes[0]
    written = {round(text.get_position()[1]) * 20 + round(text.get_position()[0]): text for text in axes.texts}
    empty = [value for number, value in enumerate(matrix.flat) if number not in written]
    assert np.abs(empty).max() < 0.005 <= np.abs([matrix.flat[number] for number in written]).min()
    for number, text in written.items():
        value = matrix.flat[number]
        rgb = np.array(colours(signed=low < 0)((value - low) / (1 - low))[:3])
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        ink, cell = {"black": 0.0, "white": 1.0}[text.get_color()], float(linear @ (0.2126, 0.7152, 0.0722))
        assert (max(ink, cell) + 0.05) / (min(ink, cell) + 0.05) >= 3  # WCAG 2
        assert lightness_contrast(ink, rgb) >= 45
        assert text.get_text() == f"{value:.2f}"


def test_a_number_that_rounds_to_0_leaves_its_cell_empty():
    weights = [[0.004, 0.006, -0.004], [0.0, 1.0, float("nan")]]
    assert [text.get_text() for text in viz.heatmap(weights, annotate=True).axes[0].texts] == ["0.01", "1.00", "–"]
    large = [[0.004, 12.0], [0.0, float("inf")]]
    assert [text.get_text() for text in viz.heatmap(large, annotate=True).axes[0].texts] == ["0.004", "12", "–"]


def test_the_colour_bar_has_a_name():
    bars = [viz.heatmap(np.eye(3), **options).axes[1] for options in ({}, {"scale_name": "nats"}, {"scale_name": ""})]
    assert [bar.get_ylabel() for bar in bars] == ["weight", "nats", ""]
    with pytest.raises(ValueError, match="heatmap: scale_name must be omitted for a mask"):
        viz.heatmap(masks.Causal(), scale_name="weight")


def test_large_values_stay_in_their_cells():
    figure = viz.heatmap([[-12345.678, 0.5]], annotate=True)
    assert [text.get_text() for text in figure.axes[0].texts] == ["-1.23e+04", "0.5"]


def test_the_colour_map_falls_evenly_in_lightness():
    rgb = colours()(np.linspace(0, 1, 21))[:, :3]
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    y = linear @ (0.2126, 0.7152, 0.0722)
    lightness = np.where(y > 0.008856, 116 * np.cbrt(y) - 16, 903.3 * y)
    np.testing.assert_allclose(-np.diff(lightness), 5.0, atol=2.5)
    assert lightness[0] == pytest.approx(100, abs=0.1)


def test_one_bright_cell_of_many_stays_visible():
    weights = np.zeros((4096, 4096), np.float32)
    weights[1234, 4000] = 1.0
    shown = pixels(viz.heatmap(weights))
    row, column = np.unravel_index(shown.argmin(), shown.shape)
    assert shown.min() < 0.05
    assert row / shown.shape[0] == pytest.approx(1234 / 4096, abs=2e-3)
    assert column / shown.shape[1] == pytest.approx(4000 / 4096, abs=2e-3)
    assert (shown < 0.9).sum() == 1


@pytest.mark.ci
@pytest.mark.parametrize("size", [749, 750, 751, 4096])
def test_a_diagonal_loses_no_row_at_any_size(size):
    shown = pixels(viz.heatmap(np.eye(size, k=1)))
    empty_rows = (shown.min(axis=1) > 0.5).sum()
    assert empty_rows <= 1  # the last row of the shifted diagonal


def test_axes_count_the_rows_and_columns_of_the_matrix_itself():
    figure = viz.heatmap(np.eye(4096))
    assert figure.axes[0].get_xlim() == (-0.5, 4095.5)
    assert max(figure.axes[0].images[0].get_array().shape) <= 750


def test_labels_never_overlap():
    names = [f"token{i}" for i in range(120)]
    figure = viz.heatmap(np.eye(120), x_labels=names, y_labels=names)
    figure.canvas.draw()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert all(upper.y0 >= lower.y1 for upper, lower in itertools.pairwise(boxes))
    assert texts(figure.axes[0].yaxis)[:3] == ["token0", "token2", "token4"]
    assert all(label.get_rotation() == 45 for label in figure.axes[0].get_xticklabels())
    level = viz.heatmap(np.eye(4), x_labels=list("abcd")).axes[0].get_xticklabels()
    assert all(label.get_rotation() == 0 for label in level)


@pytest.mark.ci
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (3, 40)])
def test_everything_stands_inside_the_figure(shape):
    labels = {
        "x_labels": ["electroencephalography"] * shape[1],
        "y_labels": ["electroencephalography"] * shape[0],
    }
    figure = viz.heatmap(np.ones(shape), title="A title that is much wider than such a narrow map " * 2, **labels)
    figure.canvas.draw()
    box, size = figure.get_tightbbox(), figure.get_size_inches()
    assert 0 < box.x0 < box.x1 < size[0]
    assert 0 < box.y0 < box.y1 < size[1]
    assert max(size) < 20


def test_nonfinite_cells_are_grey_and_outside_the_scale():
    figure = viz.heatmap([[1.0, float("nan")], [float("-inf"), 3.0]], annotate=True)
    image = figure.axes[0].images[0]
    assert image.get_clim() == (0.0, 3.0)
    assert [text.get_text() for text in figure.axes[0].texts] == ["1.00", "–", "–", "3.00"]
    figure.canvas.draw()


@pytest.mark.parametrize(
    "weights, expected",
    [([[0.2, 0.4]], (0, 0.4)), ([[-2.0, -1.0]], (-2, 2)), ([[-1.0, 3.0]], (-3, 3)), ([[0.0]], (0, 1))],
)
def test_the_scale_has_zero_at_its_end_or_in_its_middle(weights, expected):
    image = viz.heatmap(weights).axes[0].images[0]
    assert image.get_clim() == pytest.approx(expected)
    red, green, blue, _ = image.to_rgba(np.array([0.0]))[0]
    assert min(red, green, blue) > 0.97  # nothing is white


@pytest.mark.ci
@pytest.mark.parametrize("size", [20, 3000], ids=["whole", "pooled"])
def test_weights_of_both_signs_are_drawn_with_their_signs(size):
    torch.manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(1, 1, size, 4), dim=-1)
    matrix = mechanisms.Delta()(x, x, beta=torch.ones(1, 1, size), mask=masks.Causal())
    lazy, written = (
        np.ma.filled(viz.heatmap(given).axes[0].images[0].get_array(), 0.0) for given in (matrix, matrix[0, 0])
    )
    assert lazy.min() < 0 < lazy.max()
    farthest = matrix[0, 0].abs().max().item()
    assert max(lazy.max(), -lazy.min()) == pytest.approx(farthest)
    assert np.abs(written).max() == pytest.approx(farthest)
    viz.mosaic(matrix)


def test_given_limits_make_figures_comparable():
    assert viz.heatmap([[0.2]], limits=(0, 1)).axes[0].images[0].get_clim() == (0, 1)


def test_pyplot_knows_nothing_of_it():
    viz.heatmap(np.eye(3))
    viz.mosaic(np.ones((2, 3, 3)))
    assert plt.get_fignums() == []


def test_the_matrix_given_is_not_changed():
    weights = np.array([[1.0, np.inf]])
    viz.heatmap(weights)
    np.testing.assert_array_equal(weights, [[1.0, np.inf]])


@pytest.mark.parametrize(
    "weights, options, message",
    [
        (np.ones(3), {}, r"heatmap: weights must be \[q_len, kv_len\]; got shape \[3\]"),
        (torch.ones(1, 2, 2), {}, r"heatmap: weights must be \[q_len, kv_len\]; got shape \[1, 2, 2\]"),
        (np.ones((0, 3)), {}, r"heatmap: weights must have no empty axis; got shape \[0, 3\]"),
        ([[1.0], [1.0, 2.0]], {}, "heatmap: weights must have rows of equal length"),
        (np.full((2, 2), np.nan), {}, "heatmap: weights must contain at least one finite number; got only NaN"),
        (
            np.eye(2),
            {"x_labels": ["a"]},
            "heatmap: x_labels must have one label for each of the 2 columns; got 1",
        ),
        (
            np.eye(2),
            {"y_labels": ["a"] * 3},
            "heatmap: y_labels must have one label for each of the 2 rows; got 3",
        ),
        (
            np.eye(41),
            {"annotate": True},
            "heatmap: a matrix to annotate must have at most 40 rows and columns",
        ),
        (
            np.eye(2),
            {"limits": (1, 0)},
            r"heatmap: limits must be two finite numbers, low < high; got \(1\.0, 0\.0\)",
        ),
    ],
)
def test_bad_values_are_named(weights, options, message):
    with pytest.raises(ValueError, match=message):
        viz.heatmap(weights, **options)


@pytest.mark.parametrize(
    "weights, options, message",
    [
        ([["a", "b"]], {}, "heatmap: weights must be real numbers; got list of dtype <U1"),
        (
            torch.ones(2, 2, dtype=torch.complex64),
            {},
            r"heatmap: weights must be real numbers; got torch\.complex64",
        ),
        (np.eye(2), {"x_labels": "ab"}, "heatmap: x_labels must be a list of strings; got one string"),
    ],
)
def test_bad_types_are_named(weights, options, message):
    with pytest.raises(TypeError, match=message):
        viz.heatmap(weights, **options)


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ImportError, match=r"heatmap: matplotlib must be installed(.|\n)*pip install 'saccade-attention\[viz\]'"
    ):
        viz.heatmap(np.eye(2))


def test_attention_times_gradient_is_drawn_with_both_signs_and_hidden_pairs_grey():
    torch.manual_seed(0)
    matrix = sc.AttentionMatrix(*torch.randn(2, 1, 2, 12, 8), masks.Causal())
    gradient = GradientMatrix(*torch.randn(2, 1, 2, 12, 4))
    image = viz.heatmap(matrix * gradient, head=1).axes[0].images[0]
    shown = np.ma.filled(image.get_array(), np.nan)
    want = (matrix.to_dense() * gradient.to_dense())[0, 1].numpy()
    visible = np.tril(np.ones((12, 12), bool))
    np.testing.assert_allclose(shown[visible], want[visible], rtol=1e-5, atol=1e-6)
    assert np.isnan(shown[~visible]).all()
    low, high = image.get_clim()
    assert low == -high < 0
    assert high == pytest.approx(np.abs(want).max())
    red, _, blue, _ = image.cmap(0.05)
    assert blue > red
    viz.mosaic([matrix * gradient] * 2).canvas.draw()
