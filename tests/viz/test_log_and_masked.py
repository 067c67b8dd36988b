"""Hidden cells are grey and tiny weights white, on linear and logarithmic scales."""

import numpy as np
import pytest
import torch

from saccade import masks, viz

GREY = (0xC9, 0xD1, 0xD3)
CAUSAL = masks.Causal().to_dense(4)


def colours_of(figure):
    """Return the map's pixels, RGB 0 to 255, top row first."""
    figure.canvas.draw()
    picture = np.asarray(figure.canvas.buffer_rgba())[..., :3]
    box = figure.axes[0].get_window_extent()
    top, left = round(picture.shape[0] - box.y1), round(box.x0)
    return picture[top : top + round(box.height), left : left + round(box.width)]


def cell(figure, row, column, size):
    shown = colours_of(figure)
    return tuple(
        int(c) for c in shown[int((row + 0.5) * len(shown) / size), int((column + 0.5) * shown.shape[1] / size)]
    )


@pytest.mark.ci
@pytest.mark.parametrize("log", [False, True])
def test_hidden_cells_are_grey_and_zeros_are_white(log):
    weights = torch.eye(4)
    figure = viz.heatmap(weights, allowed=CAUSAL, log=log)
    assert cell(figure, 0, 3, 4) == GREY
    assert cell(figure, 3, 0, 4) == (255, 255, 255)
    assert max(cell(figure, 2, 2, 4)) < 40
    plain = viz.heatmap(weights, log=log)
    assert cell(plain, 0, 3, 4) == (255, 255, 255)


def test_a_hidden_key_stays_grey_where_cells_share_a_pixel():
    n = 2000
    weights = torch.full((n, n), 1.0)
    shown = colours_of(viz.heatmap(weights, allowed=masks.Causal().to_dense(n)))
    assert tuple(shown[5, -5]) == GREY
    assert shown[-5, 5].max() < 40


def test_a_logarithmic_scale_tells_small_weights_apart():
    weights = [[1.0, 1e-2, 1e-3, 1e-5]]
    linear, log = (viz.heatmap(weights, log=own).axes[0].images[0] for own in (False, True))
    shades = log.to_rgba(np.asarray(log.get_array()))[0, :, :3].mean(-1)
    assert (np.diff(shades) > 0.1).all()
    assert np.ptp(linear.to_rgba(np.array([1e-2, 1e-3]))[:, :3].mean(-1)) < 0.02
    assert log.norm.vmin == pytest.approx(1e-4)
    assert viz.heatmap(weights, log=True, limits=(1e-2, 1)).axes[0].images[0].norm.vmin == 1e-2


def test_a_mosaic_hides_and_scales_alike():
    maps = torch.stack([torch.eye(4), torch.eye(4) * 1e-3])
    sheet = np.asarray(viz.mosaic(maps, allowed=CAUSAL, log=True).axes[0].images[0].get_array())
    grey = np.isclose(sheet, np.array(GREY) / 255, atol=1e-3).all(-1).sum()
    assert grey == pytest.approx(2 * 112 * 112 * 6 / 16, rel=0.05)
    own, shared = (
        (np.asarray(viz.mosaic(maps, log=True, shared_scale=one).axes[0].images[0].get_array()).max(-1) < 0.1).sum()
        for one in (False, True)
    )
    assert own == 2 * shared


@pytest.mark.parametrize("draw, shape", [(viz.heatmap, (2, 2)), (viz.mosaic, (2, 2, 2))])
def test_bad_values_are_named(draw, shape):
    name = draw.__name__
    with pytest.raises(TypeError, match=f"{name}: allowed must be bool; got int64"):
        draw(np.ones(shape), allowed=np.ones((2, 2), dtype=int))
    with pytest.raises(ValueError, match=rf"{name}: allowed must be broadcastable to .*; got shape \[3, 3\]"):
        draw(np.ones(shape), allowed=np.ones((3, 3), dtype=bool))
    with pytest.raises(ValueError, match=f"{name}: allowed must allow at least one pair; got none"):
        draw(np.ones(shape), allowed=np.zeros((2, 2), dtype=bool))
    with pytest.raises(ValueError, match=f"{name}: weights must contain a number above 0 for a logarithmic scale"):
        draw(np.zeros(shape), log=True)


def test_limits_of_a_logarithmic_scale_are_above_0():
    with pytest.raises(ValueError, match="heatmap: limits must be above 0 on a logarithmic scale"):
        viz.heatmap(np.ones((2, 2)), log=True, limits=(0, 1))
