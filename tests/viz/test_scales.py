"""A sink, to which everybody gives nearly everything, leaves something to see of the rest."""

import numpy as np
import pytest
import torch

import saccade as sc
from saccade import masks, viz

N = 40


def ends(figure):
    return figure.axes[0].images[0].get_clim(), figure.axes[1].get_title(loc="left")


def with_sink(rest=0.1):
    rng = np.random.default_rng(0)
    weights = rng.random((N, N)) + 0.1
    weights[:, 0] = 0
    weights *= rest / weights.sum(1, keepdims=True)
    weights[:, 0] = 1 - rest
    return weights


def test_a_sink_does_not_set_the_scale():
    weights = with_sink()
    (low, high), title = ends(viz.heatmap(weights))
    largest = np.sort(weights[:, 1:].max(1))
    assert low == 0
    assert largest[int(0.9 * N)] <= high <= largest[-1]
    assert title == "up to 0.9"
    given, title = ends(viz.heatmap(weights, limits=(0, 1)))
    assert given == (0, 1)
    assert title == ""


def test_limits_that_leave_something_out_say_so():
    assert ends(viz.heatmap([[0.2, 0.8]], limits=(0, 0.5)))[1] == "up to 0.8"


def test_a_lazy_sink_neither():
    torch.manual_seed(0)
    query, key = torch.randn(1, 1, 3000, 16) + 1, torch.randn(1, 1, 3000, 16) / 2
    key[:, :, 0] = 2.0
    (_, high), title = ends(viz.heatmap(sc.AttentionMatrix(query, key, masks.Causal())))
    assert high < 0.1
    assert title == "up to 1"


@pytest.mark.parametrize(
    "weights",
    [np.eye(300), np.full((9, 9), 1 / 9), np.eye(300) + 1e-6, -np.eye(9), np.eye(9) - 0.5, np.eye(9)[:1], np.eye(1)],
    ids=["diagonal", "uniform", "diagonal-over-noise", "negative", "signed", "one-row", "one-cell"],
)
def test_without_a_sink_the_scale_ends_at_the_largest(weights):
    (_, high), title = ends(viz.heatmap(weights))
    assert high == pytest.approx(np.abs(weights).max())
    assert title == ""


def test_next_to_nothing_beside_a_sink_is_not_blown_up():
    assert ends(viz.heatmap(with_sink(rest=1e-9)))[0][1] == pytest.approx(1e-3)


def test_maps_of_a_mosaic_are_each_robust_and_share_the_widest_scale():
    dark = [
        int((np.asarray(viz.mosaic(maps, **options).axes[0].images[0].get_array()).max(-1) < 0.1).sum())
        for maps in (np.stack([with_sink(), np.eye(N)]), np.stack([np.full((N, N), np.nan), np.eye(N) / 100]))
        for options in ({}, {"shared_scale": True})
    ]
    assert dark[0] > dark[1] > 0
    assert dark[2] == dark[3] > 0
