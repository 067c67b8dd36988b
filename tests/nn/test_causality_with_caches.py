"""A layer with a cache computes queries before later keys are there; a mask that shows them is refused."""

import pytest
import torch

from saccade import masks
from saccade.caches import KVCache, SinkWindowCache
from saccade.nn import MultiHeadAttention
from saccade.testing import CASES, LARGE_CASES

LATER = [
    None,
    masks.Full(),
    masks.Window(2, 1),
    masks.Global([0]),
    masks.longformer(2),
    masks.Documents([3, 6]),
    masks.Prefix(7) | masks.Causal(),
    masks.Blocks([[True, True], [False, True]], 5),
    masks.Dense(torch.ones(9, 9, dtype=torch.bool)),
    masks.Predicate(lambda b, h, q, kv: (q - kv).abs() <= 3),
    ~masks.Causal(),
]
EARLIER = [
    masks.Causal(),
    masks.sliding_window(3),
    masks.Documents([3, 6], rule=masks.Causal()),
    masks.Prefix(4) | masks.Causal(),
    masks.Dense(torch.ones(9, 9, dtype=torch.bool).tril()),
    masks.Predicate(lambda b, h, q, kv: kv <= q),
    masks.sparse_transformer(3),
    masks.image_rows(3, 2, 3),
    masks.image_columns(3, 2, 3),
]


def layer(mask):
    return MultiHeadAttention(8, 2, mask=mask).eval()


@pytest.mark.parametrize("cache", [KVCache, lambda: SinkWindowCache(1, 4)], ids=["kv", "sink-window"])
@pytest.mark.parametrize("mask", LATER, ids=str)
def test_a_layer_that_looks_ahead_takes_no_cache(mask, cache):
    x = torch.randn(2, 9, 8)
    made = cache()
    with pytest.raises(ValueError, match=r"mask must hide later keys from every query with a .*Cache; got"):
        layer(mask)(x[:, :4], cache=made)
    assert made.length == 0


@pytest.mark.parametrize("mask", EARLIER, ids=str)
def test_a_layer_that_looks_back_equals_the_full_run(mask):
    x, own, cache = torch.randn(2, 9, 8), layer(mask), KVCache()
    with torch.no_grad():
        parts = [own(part, cache=cache) for part in x.split([4, 1, 3, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), own(x))


def test_the_facts_of_a_call_may_make_a_layer_causal():
    x = torch.randn(2, 9, 8)
    with pytest.raises(ValueError, match="mask must hide later keys from every query"):
        layer(masks.Full())(x, mask=masks.Padding([12, 7]), cache=KVCache())
    assert layer(masks.Full())(x, mask=masks.Causal(), cache=KVCache()).shape == x.shape


def test_ragged_items_are_asked_one_by_one():
    prefix = masks.Prefix(4) | masks.Causal()
    x, own = torch.randn(2, 4, 8), layer(prefix)
    whole = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]])
    assert own(x, cache=KVCache(), positions=whole).shape == x.shape
    short = torch.tensor([[0, 1, 2, 3], [-1, 0, 1, 2]])
    with pytest.raises(ValueError, match="mask must hide later keys from every query"):
        own(x, cache=KVCache(), positions=short)


@pytest.mark.parametrize("case", [case for case in (*CASES, *LARGE_CASES) if case.mask is not None], ids=str)
def test_a_mask_that_says_it_is_causal_is(case):
    if case.mask.is_causal:
        assert not case.mask.to_dense(460).triu(1).any()
