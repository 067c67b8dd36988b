"""Merging sums over a word's keys and averages over its queries."""

import pytest
import torch

from saccade.text import Word, merge

WORDS = (Word("a", 0, 1), Word("bc", 1, 3), Word("d", 3, 4))


def test_known_example():
    weights = torch.tensor(
        [
            [1.0, 0.0, 0.0, 0.0],
            [0.5, 0.2, 0.2, 0.1],
            [0.1, 0.0, 0.3, 0.6],
            [0.25, 0.25, 0.25, 0.25],
        ]
    )
    expected = torch.tensor([[1.0, 0.0, 0.0], [0.3, 0.35, 0.35], [0.25, 0.5, 0.25]])
    torch.testing.assert_close(merge(weights, WORDS), expected)


def test_rows_still_sum_to_one_with_leading_axes_and_other_keys():
    weights = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    merged = merge(weights, WORDS, (Word("x", 0, 4), Word("y", 4, 5)))
    assert merged.shape == (2, 3, 3, 2)
    torch.testing.assert_close(merged.sum(-1), torch.ones(2, 3, 3))
    torch.testing.assert_close(merged[1, 2, 1, 0], weights[1, 2, 1:3, :4].sum(-1).mean())


def test_half_precision_is_summed_in_float32_and_float64_stays():
    weights = torch.full((1, 4096), 1 / 4096, dtype=torch.float16)
    merged = merge(weights, [Word("q", 0, 1)], [Word("k", 0, 4096)])
    assert merged.dtype == torch.float32
    assert merged.item() == 1.0
    assert merge(torch.eye(4, dtype=torch.float64), WORDS).dtype == torch.float64


@pytest.mark.parametrize(
    "weights, words, message",
    [
        (torch.ones(4), WORDS, r"merge: weights must be \[\.\.\., q_tokens, kv_tokens\]; got \[4\]"),
        (torch.ones(4, 5), WORDS, r"merge: query_words must cover all 5 tokens; got words for 4"),
        (torch.ones(4, 4), WORDS[:2], r"merge: query_words must cover all 4 tokens; got words for 3"),
        (
            torch.ones(4, 4),
            WORDS[::-1],
            r"merge: query_words must cover the tokens in order; got word 1",
        ),
        (torch.ones(4, 4), (Word("a", 0, 0),), r"got word 1 at tokens \[0, 0\)"),
    ],
)
def test_bad_input_is_named(weights, words, message):
    with pytest.raises(ValueError, match=message):
        merge(weights, words)


def test_columns_are_named_when_they_are_wrong():
    with pytest.raises(ValueError, match="merge: key_words must cover all 5 tokens"):
        merge(torch.ones(4, 5), WORDS, WORDS)


def test_integers_are_refused():
    with pytest.raises(TypeError, match=r"merge: weights must be of a floating dtype; got torch\.int64"):
        merge(torch.ones(4, 4, dtype=torch.int64), WORDS)
