"""Sliding windows are found among masks by what they do, however they are written."""

import pytest

from saccade import masks
from saccade.masks import Causal, Mask, Window
from saccade.masks.convert.patterns import window_size
from saccade.models import DecoderConfig

SIZES = {"vocab_size": 9, "max_len": 8, "embed_dim": 8, "num_heads": 2, "num_layers": 1, "feed_forward_dim": 8}


@pytest.mark.parametrize(
    "mask, window",
    [
        (None, None),
        (Causal(), None),
        (masks.sliding_window(5), 5),
        (Window(3, 2), 4),
        (Window(None, 0), None),
        (Window(0, 0), 1),
        (Window(5, 0) & Window(3, 7), 4),
        (masks.streaming(1, 4), None),
        (masks.sparse_transformer(3), None),
        (~Window(0, 0), None),
        (masks.Padding([4]), None),
    ],
    ids=str,
)
def test_the_window_of_a_mask(mask: Mask | None, window: int | None) -> None:
    assert window_size(DecoderConfig(**SIZES, mask=mask).causal_mask) == window
