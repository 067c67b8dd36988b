"""Tests of empty caches, and of the caches of all layers of a model together."""

import pytest
import torch
from tests.caches.cache_kinds import KINDS

from saccade import masks, mechanisms
from saccade.caches import (
    BlockSelectCache,
    Cache,
    CrossCache,
    IndexedCache,
    KVCache,
    LatentCache,
    SegmentCache,
    SinkWindowCache,
)
from saccade.caches.call_arguments import Call
from saccade.caches.recurrent import Memory
from saccade.positions.token_positions import Positions

SOFTMAX, CAUSAL = mechanisms.Softmax(), masks.Causal()


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_call_holds_nothing(kind):
    cache = KINDS[kind]()
    assert (cache.length, cache.traffic) == (0, (0, 0))
    x = torch.randn(1, 2, 3, 4)
    cache.attend(SOFTMAX, x, x, x, mask=CAUSAL)
    assert cache.length == 3


@pytest.mark.parametrize(
    ("cache", "name"),
    [
        (KVCache(), "key"),
        (KVCache(), "value"),
        (LatentCache(2), "value"),
        (BlockSelectCache(2, 6), "summary"),
        (IndexedCache(), "index_key"),
    ],
    ids=["key", "value", "latent", "summary", "index key"],
)
def test_tensors_of_an_empty_cache_are_none(cache, name):
    assert getattr(cache, name) is None


@pytest.mark.parametrize(
    "make", [lambda: SinkWindowCache(2, 5), lambda: SegmentCache(4, 3)], ids=["window", "segments"]
)
def test_in_an_empty_ring_no_token_stands(make):
    places = make().kv_positions
    assert places.dtype == torch.int64
    assert len(places) == 1
    assert places.shape[1] > 0
    assert (places == -1).all()


def test_an_empty_compressive_memory_holds_no_columns():
    places = mechanisms.CompressiveMemory(4, 3).new_cache().kv_positions
    assert (places.shape, places.dtype) == ((1, 0), torch.int64)


def test_a_model_that_has_seen_nothing_and_the_sum_over_its_layers():
    empty = Cache([SinkWindowCache(2, 5), KVCache()])
    assert (empty.length, empty.traffic) == (0, (0, 0))
    assert Cache([CrossCache()]).length == 0
    x = torch.randn(2, 2, 3, 4)
    for count, layer in enumerate(empty, 1):
        for _ in range(count):
            layer.attend(SOFTMAX, x, x, x, mask=CAUSAL)
    read, appended = zip(*(layer.traffic for layer in empty), strict=True)
    assert empty.traffic == (sum(read), sum(appended))
    assert min(appended) > 0


def test_bytes_of_where_tokens_stand():
    assert Positions.ending_before(3).nbytes == 0
    assert Positions.ending_before(torch.arange(4)).nbytes == 32


def test_a_finite_memory_has_no_tainted_head():
    state = torch.zeros(2, 3, 4, 5)
    clean = Memory(state).taints
    assert (clean.shape, clean.dtype, bool(clean.any())) == ((2, 3), torch.bool, False)
    known = torch.tensor([[True, False, True]] * 2)
    assert Memory(state, tainted=known).taints is known


def test_sums_of_other_features_are_not_gone_on_with():
    cache, x = mechanisms.Performer(8, seed=0).new_cache(), torch.rand(1, 2, 3, 4)
    cache.attend(mechanisms.Performer(8, seed=0), x, x, x, mask=CAUSAL)
    with pytest.raises(ValueError, match="features must be those of the memory; got other features"):
        cache.attend(mechanisms.Performer(8, seed=1), x, x, x, mask=CAUSAL)


def test_undeclared_properties_of_a_mechanism_are_not_assumed():
    x, own = torch.randn(1, 2, 3, 4, requires_grad=True), Positions.between(0, 3)

    def call(mechanism):
        return Call(mechanism, x, x, x, CAUSAL, own, own, 0.0)

    assert call(SOFTMAX).treats_heads_alike
    assert not call(SOFTMAX.__call__).treats_heads_alike
    assert call(SOFTMAX).needs_graph
    with torch.no_grad():
        assert not call(SOFTMAX).needs_graph
