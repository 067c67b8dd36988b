"""A map of weights over its picture."""

import numpy as np
import pytest
import torch

from saccade import viz
from saccade.viz.overlays import as_grey, resized


def picture(figure):
    """The colours of the picture, ``[H, W, 3]``."""
    return np.asarray(figure.axes[0].images[0].get_array())


def scale(figure):
    """The colours of the bar, ``[weights, brightness, 3]``, and the weights at its ends."""
    (image,) = figure.axes[1].images
    return np.asarray(image.get_array()), tuple(image.get_extent()[2:])


@pytest.mark.ci
@pytest.mark.parametrize("shape", [(4, 4), (3, 9), (12, 2), (1, 1), (1, 30)], ids=str)
@pytest.mark.parametrize("size", [(4, 4), (2, 5), (1, 1), (40, 3)], ids=str)
def test_any_map_is_resized_to_any_picture(shape, size):
    own = picture(viz.spatial_map(torch.rand(shape), torch.rand(size), title="a $ b"))
    assert own.shape == (*shape, 3)
    assert np.isfinite(own).all()


@pytest.mark.parametrize("opacity", [0.3, 0.7, 1.0])
@pytest.mark.parametrize("shift", [0.0, 5.0, -0.4], ids=["from 0", "nearly even", "of both signs"])
def test_every_colour_of_the_picture_is_on_the_bar_at_its_weight(shift, opacity):
    drawn = np.random.default_rng(0)
    grey, weights = drawn.random((9, 7)), drawn.random((9, 7)) + shift
    figure = viz.spatial_map(grey, weights, opacity=opacity)
    bar, (low, high) = scale(figure)
    grey = (grey - grey.min()) / (grey.max() - grey.min())
    rows = ((weights - low) / (high - low) * (len(bar) - 1)).round().astype(int)
    columns = (grey * (bar.shape[1] - 1)).round().astype(int)
    np.testing.assert_allclose(picture(figure), bar[rows, columns], atol=0.02)


def test_nearly_even_maps_are_drawn_from_the_least_weight_on():
    even = 1 / 196 + torch.randn(14, 14) * 2e-4
    figure = viz.spatial_map(torch.ones(14, 14), even)
    assert scale(figure)[1] == pytest.approx((float(even.min()), float(even.max())))
    shown = picture(figure)
    least, most = (shown[divmod(int(place), 14)] for place in (even.argmin(), even.argmax()))
    np.testing.assert_allclose(least, least[0])  # grey
    assert most[0] - most[2] > 0.3  # red


@pytest.mark.parametrize(
    ("weights", "ends"),
    [
        ([[0.0, 0.2], [0.5, 1.0]], (0.0, 1.0)),
        ([[0.49, 0.6], [0.8, 1.0]], (0.0, 1.0)),
        ([[0.51, 0.6], [0.8, 1.0]], (0.51, 1.0)),
        ([[-0.25, 0.6], [0.8, 1.0]], (-1.0, 1.0)),
        ([[-2.0, 0.6], [0.8, 1.0]], (-2.0, 2.0)),
        ([[0.3, 0.3], [0.3, 0.3]], (0.0, 0.6)),
        ([[0.0, 0.0], [0.0, 0.0]], (0.0, 1.0)),
    ],
)
def test_the_ends_of_the_scale_fit_the_weights(weights, ends):
    figure = viz.spatial_map(torch.rand(2, 2), weights)
    assert scale(figure)[1] == pytest.approx(ends)
    assert figure.axes[1].get_ylim() == pytest.approx(ends)


def test_weights_below_0_are_blue():
    shown = picture(viz.spatial_map(torch.ones(1, 3), [[-1.0, 0.0, 1.0]], opacity=1.0))[0]
    np.testing.assert_allclose(shown, [[0.05, 0.1, 0.55], [0.65, 0.65, 0.65], [0.8, 0.0, 0.1]], atol=1e-6)


def test_a_map_keeps_its_place_and_range_when_it_is_resized():
    weights = np.zeros((2, 4), np.float32)
    weights[1, 3] = 0.7
    own = resized(weights, (6, 12))
    assert own[5, 11] == own.max() == pytest.approx(0.7)
    assert own[0, 11] == own[5, 0] == own[0, 0] == own.min() == 0
    same = np.random.default_rng(0).random((3, 5))
    np.testing.assert_array_equal(resized(same, (3, 5)), same)


@pytest.mark.parametrize("make", [np.array, torch.tensor, list, lambda rows: torch.tensor(rows).half()])
def test_any_picture_is_stretched_from_black_to_white(make):
    np.testing.assert_array_equal(
        as_grey(make([[0.0, 4.0, 16.0], [8.0, 0.0, 0.0]])), [[0.0, 0.25, 1.0], [0.5, 0.0, 0.0]]
    )


def test_colours_become_luminance_and_flat_pictures_grey():
    red, green, blue = torch.eye(3)[:, :, None]
    own = as_grey(torch.stack([red, green, blue]).reshape(3, 1, 3))
    np.testing.assert_allclose(own * (0.587 - 0.114) + 0.114, [[0.299, 0.587, 0.114]], rtol=1e-6)
    np.testing.assert_array_equal(as_grey(np.full((2, 2), 7)), 0.5)


def test_without_weight_the_picture_shows_and_with_weight_it_is_red():
    shown = picture(viz.spatial_map([[0.0, 1.0]] * 2, [[0.0, 0.0], [1.0, 1.0]], opacity=1.0))
    np.testing.assert_allclose(shown[0], [[0.3] * 3, [1.0] * 3], atol=1e-6)
    np.testing.assert_allclose(shown[1], [[0.8, 0.0, 0.1]] * 2, atol=1e-6)
    plain = picture(viz.spatial_map([[0.0, 1.0]] * 2, [[0.0, 0.0], [1.0, 1.0]], opacity=0))
    np.testing.assert_allclose(plain, [[[0.3] * 3, [1.0] * 3]] * 2, atol=1e-6)


def test_the_picture_keeps_its_proportions_and_limits_set_the_scale():
    figure = viz.spatial_map(torch.rand(20, 40), torch.rand(2, 2), limits=(0.0, 2.0), title="$x^{$")
    box, bar = (axes.get_window_extent() for axes in figure.axes)
    assert box.width == pytest.approx(2 * box.height, abs=1)
    assert (bar.y0, bar.y1) == pytest.approx((box.y0, box.y1), abs=1)
    assert bar.x0 > box.x1
    assert scale(figure)[1] == (0.0, 2.0)
    assert figure.axes[0].get_title(loc="left") == "$x^{$"
    figure.canvas.draw()


def test_an_image_with_colours_is_shown_unchanged_beside_its_map():
    image, weights = np.random.default_rng(0).random((3, 8, 20)), np.random.default_rng(1).random((8, 20))
    image[0, 0, 0], image[1, 0, 0] = 0.0, 1.0
    shown = picture(viz.spatial_map(image, weights))
    np.testing.assert_allclose(shown[:, :20], image.transpose(1, 2, 0))
    np.testing.assert_array_equal(shown[:, 20:-20], 1.0)
    np.testing.assert_allclose(shown[:, -20:], picture(viz.spatial_map(as_grey(image), weights)), atol=1e-6)
    figure = viz.spatial_map(image, weights)
    box = figure.axes[0].get_window_extent()
    assert box.width / shown.shape[1] == pytest.approx(box.height / shown.shape[0], rel=0.01)


@pytest.mark.parametrize("image", [torch.rand(9, 7), torch.rand(1, 9, 7), torch.rand(1, 9, 7).expand(3, 9, 7)], ids=len)
def test_a_grey_image_is_shown_once(image):
    assert picture(viz.spatial_map(image, torch.rand(3, 3))).shape == (9, 7, 3)


@pytest.mark.parametrize("draw", [viz.spatial_map, viz.overlay])
def test_the_bar_says_what_its_directions_are(draw):
    bar = draw(torch.rand(3, 9, 9), torch.rand(3, 3)).axes[1]
    assert (bar.get_xlabel(), bar.get_ylabel()) == ("brightness", "weight")


def test_gates_can_be_drawn_on_their_full_scale():
    gates = torch.sigmoid(torch.linspace(-0.2, 0.2, 4)).reshape(1, 2, 2)
    ends = float(gates.min()), float(gates.max())
    assert scale(viz.spatial_map(torch.rand(3, 4, 4), gates))[1] == pytest.approx(ends)
    assert scale(viz.spatial_map(torch.rand(3, 4, 4), gates, limits=(0, 1)))[1] == (0.0, 1.0)


@pytest.mark.parametrize(
    ("image", "weights", "options", "sentence"),
    [
        (torch.zeros(5), torch.zeros(2, 2), {}, r"spatial_map: image must be \[H, W\] or \[1, H, W\] or \[3, H, W\]"),
        (np.zeros((4, 5, 3)), torch.zeros(2, 2), {}, r"got shape \[4, 5, 3\]\.\nHint: channels come first"),
        (torch.zeros(4, 4), torch.zeros(2), {}, r"weights must be \[H, W\] or \[1, H, W\]; got shape \[2\]"),
        (
            torch.zeros(4, 4),
            torch.zeros(2, 2, 2),
            {},
            r"weights must be \[H, W\] or \[1, H, W\]; got shape \[2, 2, 2\]",
        ),
        (torch.zeros(0, 4), torch.zeros(2, 2), {}, r"image must have no empty axis"),
        (torch.zeros(4, 4), torch.tensor([[float("nan")]]), {}, r"weights must be finite everywhere"),
        (torch.zeros(4, 4), torch.zeros(2, 2), {"opacity": 1.5}, r"opacity must be between 0 and 1; got 1\.5"),
        (torch.zeros(4, 4), torch.zeros(2, 2), {"opacity": True}, r"opacity must be between 0 and 1; got True"),
        (torch.zeros(4, 4), torch.zeros(2, 2), {"limits": (1, 1)}, r"limits must be two finite numbers"),
    ],
)
def test_wrong_values_are_refused(image, weights, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        viz.spatial_map(image, weights, **options)


def test_wrong_types_are_refused():
    with pytest.raises(TypeError, match="spatial_map: image must be real numbers"):
        viz.spatial_map([["a"]], [[1.0]])
