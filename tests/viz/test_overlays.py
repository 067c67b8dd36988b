"""A map of weights over its picture."""

import numpy as np
import pytest
import torch

from saccade import viz


def layers(figure):
    """The picture and the map, as arrays."""
    return [np.asarray(image.get_array()) for image in figure.axes[0].images]


def pixels(figure):
    figure.canvas.draw()
    picture = np.asarray(figure.canvas.buffer_rgba())[..., :3] / 255
    box = figure.axes[0].get_window_extent()
    top, left = round(picture.shape[0] - box.y1), round(box.x0)
    return picture[top : top + round(box.height), left : left + round(box.width)]


@pytest.mark.ci
@pytest.mark.parametrize("shape", [(4, 4), (3, 9), (12, 2), (1, 1), (1, 30)], ids=str)
@pytest.mark.parametrize("size", [(4, 4), (2, 5), (1, 1), (40, 3)], ids=str)
def test_any_map_is_resized_to_any_picture(shape, size):
    picture, own = layers(viz.spatial_map(torch.rand(shape), torch.rand(size), title="a $ b"))
    assert picture.shape == own.shape == shape
    assert np.isfinite(own).all()


def test_a_map_of_the_picture_s_size_is_drawn_as_it_is():
    weights = np.random.default_rng(0).random((3, 5))
    _, own = layers(viz.spatial_map(np.zeros((3, 5)), weights))
    np.testing.assert_array_equal(own, weights)


def test_a_map_keeps_its_place_and_range_when_it_is_resized():
    weights = torch.zeros(1, 2, 4)
    weights[0, 1, 3] = 0.7
    _, own = layers(viz.spatial_map(torch.zeros(1, 6, 12), weights))
    assert own[5, 11] == own.max()
    assert own[0, 11] == own[5, 0] == 0
    assert own[0, 0] == 0
    assert own.max() == pytest.approx(0.7)
    assert own.min() == 0


@pytest.mark.parametrize("make", [np.array, torch.tensor, list, lambda rows: torch.tensor(rows).half()])
def test_any_picture_is_stretched_from_black_to_white(make):
    picture, _ = layers(viz.spatial_map(make([[0.0, 4.0, 16.0], [8.0, 0.0, 0.0]]), [[1.0]]))
    np.testing.assert_array_equal(picture, [[0.0, 0.25, 1.0], [0.5, 0.0, 0.0]])


def test_colours_become_luminance_and_flat_pictures_grey():
    red, green, blue = torch.eye(3)[:, :, None]
    picture, _ = layers(viz.spatial_map(torch.stack([red, green, blue]).reshape(3, 1, 3), [[1.0]]))
    np.testing.assert_allclose(picture * (0.587 - 0.114) + 0.114, [[0.299, 0.587, 0.114]], rtol=1e-6)
    picture, _ = layers(viz.spatial_map(np.full((2, 2), 7), [[1.0]]))
    np.testing.assert_array_equal(picture, 0.5)


def test_without_weight_the_picture_shows_and_with_weight_it_is_red():
    shown = pixels(viz.spatial_map([[0.0, 1.0]] * 2, [[0.0, 0.0], [1.0, 1.0]], opacity=1.0))
    height, width = shown.shape[:2]
    np.testing.assert_allclose(shown[height // 4, width // 4], 0, atol=0.01)
    np.testing.assert_allclose(shown[height // 4, 3 * width // 4], 1, atol=0.01)
    for column in (width // 4, 3 * width // 4):
        np.testing.assert_allclose(shown[3 * height // 4, column], [0.8, 0.0, 0.1], atol=0.01)
    plain = pixels(viz.spatial_map([[0.0, 1.0]] * 2, [[0.0, 0.0], [1.0, 1.0]], opacity=0))
    np.testing.assert_allclose(plain[3 * height // 4, 3 * width // 4], 1, atol=0.01)


def test_the_picture_keeps_its_proportions_and_limits_set_the_scale():
    figure = viz.spatial_map(torch.rand(20, 40), torch.rand(2, 2), limits=(0.0, 2.0), title="$x^{$")
    box = figure.axes[0].get_window_extent()
    assert box.width == pytest.approx(2 * box.height, abs=1)
    assert figure.axes[0].images[1].get_clim() == (0.0, 2.0)
    assert figure.axes[0].get_title(loc="left") == "$x^{$"
    figure.canvas.draw()


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
