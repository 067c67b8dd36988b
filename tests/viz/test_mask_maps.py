"""A mask is drawn as the pairs that it allows, at any length."""

import numpy as np
import pytest
import torch

from saccade import masks, viz


def cells(figure):
    return np.ma.filled(figure.axes[0].images[0].get_array(), np.nan)


@pytest.mark.parametrize(
    ("mask", "lengths"),
    [
        (masks.Causal(), {}),
        (masks.Window(3, 1), {"q_len": 9, "kv_len": 14}),
        (masks.Causal() & (masks.Window(2, 0) | masks.Global([0])), {"kv_len": 20}),
        (masks.Documents((3, 4, 5)) & masks.Causal(), {}),
        (masks.Predicate(lambda b, h, q, kv: (q + kv) % 3 == 0), {"q_len": 7}),
        (masks.Full(), {"kv_len": 5}),
    ],
    ids=str,
)
def test_allowed_pairs_are_coloured_and_hidden_ones_grey(mask, lengths):
    figure = viz.heatmap(mask, title="A mask", **lengths)
    shown = cells(figure)
    q_len, kv_len = shown.shape
    rows, columns = lengths.get("q_len"), lengths.get("kv_len")
    assert (rows or q_len, columns or kv_len) == (q_len, kv_len)
    want = mask.to_dense(q_len, kv_len)[0, 0].numpy()
    np.testing.assert_array_equal(shown == 1, want)
    np.testing.assert_array_equal(np.isnan(shown), ~want)
    assert len(figure.axes) == 1  # no colour scale


def test_a_mask_has_the_length_it_was_made_for_or_32():
    assert cells(viz.heatmap(masks.Causal())).shape == (32, 32)
    assert cells(viz.heatmap(masks.Documents((3, 4)))).shape == (7, 7)
    assert cells(viz.heatmap(masks.Causal(), x_labels=list("abc"), y_labels=list("abcd"))).shape == (4, 3)


def test_a_long_mask_is_pooled():
    mask = masks.Causal() & masks.Window(999, 0)
    shown = cells(viz.heatmap(mask, kv_len=100_000, q_len=100_000))
    assert max(shown.shape) <= 1000
    assert 0.01 < (shown == 1).mean() < 0.03


def test_items_and_heads_are_chosen():
    mask = masks.Padding((2, 5))
    for item, width in enumerate((2, 5)):
        assert (cells(viz.heatmap(mask, batch=item, kv_len=6)) == 1).sum() == 6 * width
    each = masks.Dense(torch.stack([torch.eye(4), torch.ones(4, 4)]).bool()[None])
    assert (cells(viz.heatmap(each, head=0)) == 1).sum() == 4
    with pytest.raises(ValueError, match="head must be given, from 0 to 1"):
        viz.heatmap(each)


def test_options_of_weights_are_refused():
    for options in ({"annotate": True}, {"log": True}, {"limits": (0, 1)}, {"allowed": torch.ones(4, 4).bool()}):
        (name,) = options
        with pytest.raises(ValueError, match=f"heatmap: {name} must be omitted for a mask"):
            viz.heatmap(masks.Causal(), **options)
    with pytest.raises(ValueError, match="q_len must be omitted for weights"):
        viz.heatmap(torch.eye(3), q_len=3)
    with pytest.raises(ValueError, match="kv_len must be"):
        viz.heatmap(masks.Causal(), kv_len=0)
