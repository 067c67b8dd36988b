"""Every head's map in one figure."""

import numpy as np
import pytest
import torch

from saccade import viz


def names(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def sheet(figure):
    return np.asarray(figure.axes[0].images[0].get_array())


def dark(figure):
    """How many pixels are at the dark end of the scale."""
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


def test_one_bright_cell_of_many_stays_visible():
    maps = np.zeros((1, 2000, 2000), np.float32)
    maps[0, 777, 1999] = 1
    assert dark(viz.mosaic(maps)) == 1


def test_the_chosen_map_is_framed():
    maps = np.zeros((2, 2, 3, 3))
    maps[..., 0, 0] = 1
    plain, framed = viz.mosaic(maps), viz.mosaic(maps, highlight=(1, 0), title="Every head of every layer")
    weights = [text.get_weight() for text in framed.axes[0].texts]
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
