"""IndexedCache: what an indexer chooses with a cache is what it chooses in the full run, ties included."""

import itertools

import pytest
import torch
from torch import Tensor

from saccade import caches, masks, mechanisms
from saccade.scorers import BlockMeans, LightningIndexer
from saccade.support.errors import UnsupportedError


def _integers(*shape: int) -> Tensor:
    """Small integers: their products are exact, so that ties are, and are many."""
    return torch.randint(-2, 3, shape).float()


class Indexer:
    """Tensors of an indexer that ties often, and calls with parts of them."""

    def __init__(self, n: int, batch: int = 2):
        self.index = _integers(batch, 3, n, 2), _integers(batch, 1, n, 2), _integers(batch, 3, n)
        self.q, self.k, self.v = torch.randn(batch, 4, n, 8), *torch.randn(2, batch, 2, n, 8)

    def call(self, cache: caches.LayerCache, own: slice, k: int, size: int, **options: object) -> Tensor:
        """The next tokens."""
        iq, ik, w = self.index
        scorer = LightningIndexer(iq[:, :, own], ik[:, :, own], w[:, :, own])
        q, key, v = (x[:, :, own] for x in (self.q, self.k, self.v))
        return cache.attend(mechanisms.TopK(scorer, k, size), q, key, v, mask=masks.Causal(), **options)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("cuts", [(20,), (1, 2, 3), (7, 8, 9, 20, 30), (39,)], ids=str)
def test_any_split_is_the_full_run_ties_included(cuts: tuple[int, ...], size: int) -> None:
    n = 40
    its = Indexer(n)
    full = mechanisms.TopK(LightningIndexer(*its.index), 3, size)(its.q, its.k, mask=masks.Causal()) @ its.v
    cache, edges = caches.IndexedCache(), [0, *cuts, n]
    out = [its.call(cache, slice(i, j), 3, size) for i, j in itertools.pairwise(edges)]
    torch.testing.assert_close(torch.cat(out, 2), full)


def test_index_keys_fork_crop_reorder_and_are_saved(tmp_path: object) -> None:
    its, cache = Indexer(30), caches.IndexedCache(max_len=30)
    full = mechanisms.TopK(LightningIndexer(*its.index), 3)(its.q, its.k, mask=masks.Causal()) @ its.v
    its.call(cache, slice(0, 20), 3, 1)
    other = cache.fork()
    its.call(other, slice(20, 25), 3, 1)
    other.crop(18)
    other.reorder([1, 0])
    assert (cache.length, other.length) == (20, 18)
    caches.save_cache(cache, f"{tmp_path}/cache.safetensors")
    loaded = caches.load_cache(f"{tmp_path}/cache.safetensors")
    for own in (cache, loaded):
        torch.testing.assert_close(its.call(own, slice(20, 30), 3, 1), full[:, :, 20:])
    its.index, rest = tuple(x[[1, 0]] for x in its.index), [x[[1, 0]] for x in (its.q, its.k, its.v)]
    its.q, its.k, its.v = rest
    torch.testing.assert_close(its.call(other, slice(18, 30), 3, 1), full[[1, 0], :, 18:])


def test_an_indexed_cache_wants_index_keys() -> None:
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    with pytest.raises(UnsupportedError, match="has no index keys"):
        caches.IndexedCache().attend(mechanisms.TopK(BlockMeans(), 2, 2), q, k, v)
    with pytest.raises(UnsupportedError, match=r"Softmax(.|\n)*has no index keys"):
        caches.IndexedCache().attend(mechanisms.Softmax(), q, k, v)
    with pytest.raises(UnsupportedError, match="index keys would be missing"):
        caches.IndexedCache().fill(k, v)


@pytest.mark.parametrize("size", [1, 4])
def test_a_step_reads_what_is_chosen_and_all_index_keys(size: int) -> None:
    n = 38  # the last block is short
    its, cache = Indexer(n), caches.IndexedCache()
    its.call(cache, slice(0, n - 1), 3, size)
    its.call(cache, slice(n - 1, n), 3, size)
    full = mechanisms.TopK(LightningIndexer(*its.index), 3, size)(its.q, its.k, mask=masks.Causal()).to_dense()
    chosen = (full[:, :, -1] > 0).unflatten(1, (2, 2)).any(2)  # by some query head of each key head
    a_key = 2 * its.k.shape[3] * its.k.element_size()
    assert cache.index_key is not None
    assert cache.traffic == (int(chosen.sum()) * a_key + cache.index_key.nbytes, 2 * 2 * a_key)
