"""Lazy matrices are drawn as what they are written out, and never written out."""

import numpy as np
import pytest
import torch
from tests.sampled import sampled

import saccade as sc
from saccade import masks, viz
from saccade.matrix import Matrix
from saccade.mechanisms import Linear, Nystrom
from saccade.recording.derived_matrices import ChosenHeads, JoinedMatrices
from saccade.scores import Gaussian

BATCH, HEADS, LEN, WIDTH = 2, 3, 1700, 8  # longer than the 750 pixels of a map


def inputs(q_len=LEN, kv_len=LEN):
    torch.manual_seed(0)
    return torch.randn(BATCH, HEADS, q_len, WIDTH), torch.randn(BATCH, HEADS, kv_len, WIDTH)


def softmax(mask, q_len=LEN, kv_len=LEN, **options):
    return sc.AttentionMatrix(*inputs(q_len, kv_len), mask, **options)


BY_HEAD = masks.Predicate(lambda b, h, q, kv: (q // 300 + h + b) % 3 >= kv // 400)
TOKENS = torch.arange(LEN) >= torch.tensor([[0], [500]])  # [batch, kv]
SPARSE = masks.Causal() & (masks.Window(300, 0) | masks.Global([0]))

CASES = {
    "everyone": (softmax(None), None),
    "causal": (softmax(masks.Causal()), masks.Causal()),
    "few-queries": (softmax(masks.Causal(), 100), masks.Causal()),
    "window-and-sink": (softmax(SPARSE), SPARSE),
    "strided": (softmax(masks.Strided(5) | masks.Window(3, 3)), masks.Strided(5) | masks.Window(3, 3)),
    "padding": (softmax(masks.Padding([LEN, 900])), masks.Padding([LEN, 900])),
    "heads-apart": (softmax(BY_HEAD), BY_HEAD),
    "tensor": (softmax(TOKENS[:, None, None]), masks.Dense(TOKENS[:, None, None].expand(BATCH, 1, LEN, LEN))),
    "scores": (softmax(masks.Causal(), score=Gaussian(), scale=0.3), masks.Causal()),
    "linear": (Linear()(*inputs(), mask=masks.Causal()), masks.Causal()),
    "nystrom": (Nystrom(16)(*inputs()), None),
    "short": (softmax(masks.Causal(), 5, 9), masks.Causal()),
    "short-linear": (Linear()(*inputs(9, 9), mask=masks.Causal()), masks.Causal()),
    "chosen": (ChosenHeads(softmax(SPARSE), [2, 0, 1]), SPARSE),
    "joined": (JoinedMatrices([softmax(SPARSE, 9, 9), softmax(SPARSE, 1, 10)], [0, 0]), SPARSE),
}


def drawn(figure):
    return np.ma.filled(figure.axes[0].images[0].get_array().astype(float), np.nan)


def pooled(weights, allowed, bins):
    """The largest allowed weight of each cell, one weight at a time; NaN where none is allowed."""
    rows, columns = (np.arange(n) * min(bins, n) // n for n in weights.shape)
    cells = np.full((rows[-1] + 1, columns[-1] + 1), np.nan)
    places = tuple(np.broadcast_arrays(rows[:, None], columns))
    np.fmax.at(cells, places, np.where(allowed, weights.astype(float), np.nan))
    return cells


@pytest.mark.ci
@pytest.mark.parametrize("name", sampled(CASES, 3))
def test_a_map_holds_the_largest_weights_and_hides_what_the_mask_hides(name):
    matrix, mask = CASES[name]
    batch, head = 1, 2
    weights = matrix.to_dense(limit=1 << 40)[batch, head].numpy()
    allowed = np.ones(weights.shape, dtype=bool)
    if mask is not None:
        whole = mask.to_dense(*weights.shape, batch=BATCH, heads=HEADS)
        allowed = whole[batch, 0 if name == "chosen" else head].numpy()
    found = drawn(viz.heatmap(matrix, head=head, batch=batch))
    expected = pooled(np.maximum(weights, 0.0) if max(weights.shape) > 750 else weights, allowed, 750)
    assert found.shape == tuple(min(750, n) for n in weights.shape)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-9)


class Watched(Matrix):
    """Counts the blocks that are asked for, and refuses to be written out."""

    def __init__(self, inner):
        self.inner, self.asked = inner, []

    shape = property(lambda self: self.inner.shape)
    dtype = property(lambda self: self.inner.dtype)
    device = property(lambda self: self.inner.device)
    kv_heads = property(lambda self: self.inner.kv_heads)

    def blocks(self, batch=None, head=None, rows=None):
        self.asked.append((batch, head))
        return self.inner.blocks(batch, head, rows)

    def to_dense(self, **options):
        pytest.fail("written out")


def test_only_the_chosen_head_is_computed_and_nothing_is_written_out():
    watched = Watched(softmax(masks.Causal()))
    viz.heatmap(watched, head=1, batch=1)
    viz.mosaic(watched)
    assert watched.asked == [(1, 1), (0, None)]


def test_gradients_are_left_alone():
    query, key = (x.requires_grad_() for x in inputs(30, 30))
    matrix = sc.AttentionMatrix(query, key, masks.Causal())
    viz.heatmap(matrix, head=0)
    viz.mosaic([matrix, matrix])
    assert query.grad is None
    (matrix @ key).sum().backward()


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def test_axes_count_positions():
    axes = viz.heatmap(softmax(masks.Causal(), 100, 8000), head=0).axes[0]
    assert labels(axes.yaxis)[0] == "7,900"
    assert "4,000" in labels(axes.xaxis)
    shown = dict(zip(axes.xaxis.get_ticklocs().tolist(), labels(axes.xaxis), strict=True))
    assert all(f"{place:,.0f}" == text for place, text in shown.items())
    apart = softmax(masks.Causal(), 2, 4, q_positions=[90, 91], kv_positions=[0, 1, -1, 90])
    assert labels(viz.heatmap(apart, head=0).axes[0].xaxis) == ["0", "1", "–", "90"]


def test_a_mosaic_of_layers_names_layers_and_heads():
    layer = softmax(masks.Causal())
    one, two = viz.mosaic(layer), viz.mosaic([layer, layer], highlight=(1, 2))
    assert [text.get_text() for text in one.axes[0].texts][:-1] == ["H0", "H1", "H2"]  # and the subtitle
    assert [text.get_text() for text in two.axes[0].texts][-2] == "L1 H2"
    short = softmax(masks.Causal(), 20, 20)
    allowed = masks.Causal().to_dense(20)
    written = viz.mosaic(short.to_dense()[1], allowed=allowed)
    np.testing.assert_allclose(drawn(viz.mosaic(short, batch=1)), drawn(written), atol=1e-5)


@pytest.mark.parametrize(
    "draw, options, error, message",
    [
        (viz.heatmap, {}, ValueError, "heatmap: head must be given, from 0 to 2; got None"),
        (viz.heatmap, {"head": 3}, ValueError, "heatmap: head must be from 0 to 2; got 3"),
        (viz.heatmap, {"head": 1.0}, TypeError, "heatmap: head must be an int; got 1.0"),
        (viz.heatmap, {"head": 0, "batch": -1}, ValueError, "heatmap: batch must be from 0 to 1; got -1"),
        (viz.heatmap, {"head": 0, "allowed": np.eye(9) > 0}, ValueError, "heatmap: allowed must be omitted"),
        (viz.heatmap, {"head": 0, "x_labels": ["a"]}, ValueError, "one label for each of the 9 columns; got 1"),
        (viz.mosaic, {"batch": 2}, ValueError, "mosaic: batch must be from 0 to 1; got 2"),
        (viz.mosaic, {"allowed": np.eye(9) > 0}, ValueError, "mosaic: allowed must be omitted"),
    ],
)
def test_bad_values_are_named(draw, options, error, message):
    with pytest.raises(error, match=message):
        draw(softmax(masks.Causal(), 9, 9), **options)


def test_an_array_has_no_head_to_choose():
    with pytest.raises(ValueError, match="heatmap: head must be omitted for an array of weights; got 1"):
        viz.heatmap(np.eye(3), head=1)
    with pytest.raises(ValueError, match="mosaic: weights must all be of one shape"):
        viz.mosaic([softmax(None, 3, 3), softmax(None, 4, 4)])
    with pytest.raises(ValueError, match="heatmap: weights must have no empty axis"):
        viz.heatmap(softmax(None, 0, 3), head=0)
