"""A wrong mechanism or path is refused with a message before a cache stores or writes anything."""

import re

import pytest
import torch

from saccade.caches import (
    BlockSelectCache,
    CompressiveCache,
    CrossCache,
    HeavyHitterCache,
    Int8Cache,
    KVCache,
    LayerCache,
    PrefixStore,
    QuantizedCache,
    RecurrentCache,
    SegmentCache,
    SinkWindowCache,
    SnapKVCache,
    load_cache,
    save_cache,
)
from saccade.mechanisms import Softmax

CACHES = [
    KVCache(),
    BlockSelectCache(2, 6),
    HeavyHitterCache(4),
    SnapKVCache(4, window=2),
    Int8Cache(2),
    QuantizedCache(4, 2),
    SinkWindowCache(1, 2),
    SegmentCache(2, 1),
    RecurrentCache(),
    CompressiveCache(),
]


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: type(cache).__name__)
def test_a_mechanism_without_matrix_is_refused(cache: LayerCache) -> None:
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(
        TypeError,
        match=r"Cache\.attend: mechanism must be a function that returns " r"attention matrices; got NoneType\.",
    ):
        cache.attend(None, x, x, x)
    assert cache.length == 0


def test_a_step_and_a_filled_context_refuse_it_too() -> None:
    x = torch.randn(1, 2, 9, 4)
    blocks, cross = BlockSelectCache(1, 3), CrossCache()
    blocks.attend(Softmax(), x, x, x)
    cross.attend(Softmax(), x, x, x)
    for cache in (blocks, cross):
        with pytest.raises(TypeError, match="mechanism must be a function that returns attention matrices; got str"):
            cache.attend("softmax", *[x[:, :, :1]] * 3)
        assert cache.length == 9


@pytest.mark.parametrize("path", [None, 3, b"text.cache", ["text.cache"]], ids=repr)
def test_a_wrong_path_is_refused(path: object) -> None:
    got = re.escape(f"got {type(path).__name__}.")
    with pytest.raises(TypeError, match=f"save_cache: path must be a string or a path; {got}"):
        save_cache(KVCache(), path)
    with pytest.raises(TypeError, match=f"load_cache: path must be a string or a path; {got}"):
        load_cache(path)
    with pytest.raises(TypeError, match=f"PrefixStore: folder must be a string or a path; {got}"):
        PrefixStore(path, 100, fingerprint="model")
