"""A mask function of transformers and the rule that is made of it allow the same pairs."""

import pytest
import torch
from transformers import masking_utils as theirs

from saccade.integrations.mask_functions import as_rule, placed_rule

LENGTH = 12
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [0] * 12])
FROM_ZERO = torch.tensor([[*range(5), *range(4), *range(3)], [*range(12)]])
FROM_LATER = FROM_ZERO + torch.tensor([[2] * 5 + [3] * 4 + [0] * 3, [1] * 12])
BLOCKS = torch.tensor([[-1, -1, 0, 0, 0, -1, 1, 1, 1, 1, -1, -1], [-1] * 12])
NO_PADDING, PADDING = torch.zeros(2, dtype=torch.int64), torch.tensor([3, 0])


def odd(b, h, q, kv):
    return (q + kv) % 2 == 1


def packed(function, positions):
    return theirs.packed_sequence_compatibility_function(function, positions, DOCUMENTS)


FUNCTIONS = {
    "causal": (theirs.causal_mask_function, True),
    "bidirectional": (theirs.bidirectional_mask_function, True),
    "window": (theirs.sliding_window_causal_mask_function(4), True),
    "window of nothing": (theirs.sliding_window_causal_mask_function(0), False),
    "window on both sides": (theirs.sliding_window_bidirectional_mask_function(3), True),
    "window on both sides of nothing": (theirs.sliding_window_bidirectional_mask_function(-1), False),
    "chunks": (theirs.chunked_causal_mask_function(5, NO_PADDING), True),
    "chunks behind padding": (theirs.chunked_causal_mask_function(5, PADDING), False),
    "or": (theirs.or_masks(theirs.sliding_window_causal_mask_function(2), theirs.chunked_overlay(3, NO_PADDING)), True),
    "blocks": (theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(BLOCKS)), False),
    "own": (theirs.and_masks(theirs.causal_mask_function, odd), False),
    "packed": (packed(theirs.causal_mask_function, FROM_ZERO), True),
    "packed window": (packed(theirs.sliding_window_causal_mask_function(3), FROM_ZERO), True),
    "packed chunks": (packed(theirs.chunked_causal_mask_function(3, NO_PADDING), FROM_ZERO), True),
    "packed chunks from later": (packed(theirs.chunked_causal_mask_function(3, NO_PADDING), FROM_LATER), False),
    "packed alone": (theirs.packed_sequence_mask_function(DOCUMENTS), True),
    "packed and own": (packed(theirs.and_masks(theirs.causal_mask_function, odd), FROM_ZERO), False),
}


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_pairs(name, one_by_one):
    function, is_known = FUNCTIONS[name]
    rule = as_rule(function, one_by_one=one_by_one)
    axes = (torch.arange(size) for size in (2, 1, LENGTH, LENGTH))
    b, h, q, kv = torch.meshgrid(*axes, indexing="ij")
    assert torch.equal(rule.to_dense(LENGTH, batch=2, heads=1), function(b, h, q, kv))
    assert ("Predicate" not in str(rule)) == is_known


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("attention_mask", [None, "left", "right", "holes", "short", "short, right", "short, holes"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"q_length": 12, "kv_length": 12},
        {"q_length": 3, "kv_length": 12, "q_offset": 9},
        {"q_length": 1, "kv_length": 12, "q_offset": torch.tensor(5)},
        {"q_length": 2, "kv_length": 4, "q_offset": 10, "kv_offset": 8},
    ],
    ids=["whole", "step", "static", "sliding"],
)
def test_the_mask_that_they_write_out(name, attention_mask, sizes):
    function = FUNCTIONS[name][0]
    padding = {
        None: None,
        "left": torch.arange(LENGTH) >= torch.tensor([[3], [0]]),
        "right": torch.arange(LENGTH) < torch.tensor([[9], [12]]),
        "holes": torch.tensor([[1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1], [1] * 12]).bool(),
        "short": torch.ones(2, 10, dtype=torch.bool),
        "short, right": torch.arange(10) < torch.tensor([[7], [10]]),
        "short, holes": torch.tensor([[1, 1, 0, 0, 1, 1, 1, 0, 1], [1] * 9]).bool(),
    }[attention_mask]
    options = {"allow_is_causal_skip": False, "mask_function": function, "attention_mask": padding}
    expected = theirs.sdpa_mask(2, **sizes, **options)
    rule, q, kv = placed_rule(function, padding, **sizes)[:3]
    places = (torch.arange(span.start, span.stop) for span in (q, kv))
    allowed = rule.to_dense(len(q), len(kv), batch=2, **dict(zip(("q_positions", "kv_positions"), places, strict=True)))
    assert torch.equal(allowed, expected.expand(2, 1, -1, -1))
