"""Tests of KVCache: where it writes, what it moves and copies, and how many bytes a step reads."""

import pytest
import torch
from torch import Tensor

from saccade import masks
from saccade.caches import KVCache, LatentCache, padded_positions
from saccade.mechanisms import Softmax

SOFTMAX, CAUSAL = Softmax(), masks.Causal()
TOKEN = 2 * 1 * 4 * 4 * 2  # batch, key heads, width, bytes, key and value


def _qkv(length: int) -> list[Tensor]:
    return [torch.randn(2, heads, length, 4) for heads in (2, 1, 1)]


def _held(cache: KVCache) -> tuple[int, int]:
    """Return the memory addresses of keys and values."""
    assert cache.key is not None
    assert cache.value is not None
    return cache.key.data_ptr(), cache.value.data_ptr()


def test_a_step_moves_nothing_as_long_as_there_is_room() -> None:
    cache, read = KVCache(), []

    def mechanism(query: Tensor, key: Tensor, **where: object) -> object:
        read.append(key.data_ptr())
        return SOFTMAX(query, key, **where)

    cache.attend(SOFTMAX, *_qkv(12), mask=CAUSAL)
    place = _held(cache)
    for _ in range(4):  # 16 are room for the first ones
        cache.attend(mechanism, *_qkv(1), mask=CAUSAL)
        assert _held(cache) == place
    assert read == [place[0]] * 4  # and is read where it lies
    assert cache.nbytes == 16 * TOKEN


def test_a_fork_moves_once_and_takes_no_more_room() -> None:
    cache = KVCache()
    cache.attend(SOFTMAX, *_qkv(14), mask=CAUSAL)
    fork, full = cache.fork(), cache.fork()
    full.attend(SOFTMAX, *_qkv(2), mask=CAUSAL)
    assert (full.length, full.nbytes) == (16, 16 * TOKEN)
    fork.attend(SOFTMAX, *_qkv(1), mask=CAUSAL)
    place = _held(fork)
    assert all(own != other for own, other in zip(place, _held(cache), strict=True))
    fork.attend(SOFTMAX, *_qkv(1), mask=CAUSAL)
    assert _held(fork) == place


def test_a_call_of_no_tokens_moves_no_bytes() -> None:
    cache = KVCache()
    cache.attend(SOFTMAX, *_qkv(3), mask=CAUSAL)
    assert cache.traffic == (3 * TOKEN, 3 * TOKEN)
    cache.attend(SOFTMAX, *_qkv(0), mask=CAUSAL)
    assert cache.traffic == (0, 0)


@pytest.mark.parametrize("lengths", [[[1000, 2001], [2500, 501]], [[1000, 2001], [2500, 501], [2991, 10]]], ids=str)
def test_a_step_reads_of_each_item_its_last_document(lengths: list[list[int]]) -> None:
    x = torch.randn(len(lengths), 1, 3001, 4)
    cache = KVCache()
    cache.fill(x[:, :, :3000], x[:, :, :3000])
    cache.attend(SOFTMAX, *([x[:, :, 3000:]] * 3), mask=masks.Documents(lengths, rule=CAUSAL))
    token = 2 * 4 * x.element_size()
    assert cache.traffic == (sum(own[-1] for own in lengths) * token, len(lengths) * token)
    assert all(type(moved) is int for moved in cache.traffic)


def test_a_step_of_a_ragged_batch_reads_the_windows_of_its_items() -> None:
    lengths, width = (3000, 1000), 4
    x = torch.randn(2, 1, 3001, width)
    cache = KVCache()
    cache.fill(x[:, :, :3000], x[:, :, :3000], positions=padded_positions(lengths, side="left"))
    cache.attend(SOFTMAX, *([x[:, :, 3000:]] * 3), mask=masks.Window(9, 0))
    token = 2 * width * x.element_size()
    assert cache.traffic == (2 * 10 * token, 2 * token)


def test_growing_moves_memory_rarely() -> None:
    cache, places = KVCache(), set()
    for _ in range(200):
        cache.attend(SOFTMAX, *_qkv(1), mask=CAUSAL)
        assert cache.key is not None
        places.add(cache.key.untyped_storage().nbytes())
    assert len(places) <= 5
    assert cache.key.shape == (2, 1, 200, 4)


def test_a_single_token_is_read_as_a_whole() -> None:
    x, cache = torch.randn(1, 1, 1, 4), KVCache()
    cache.attend(SOFTMAX, x, x, x, mask=masks.Predicate(lambda b, h, q, kv: q == kv))
    assert cache.traffic == (2 * x.nbytes, 2 * x.nbytes)


def test_latents_are_filled_in_where_they_stand() -> None:
    key, cache = torch.randn(2, 1, 4, 5), LatentCache(3)
    cache.fill(key, key[..., :3], positions=range(5, 9))
    assert (cache.kv_positions, cache.positions(1)) == (range(5, 9), range(9, 10))
    where = torch.tensor([[0, 1, 2, 3], [-1, 0, 1, 2]])
    ragged = LatentCache(3)
    ragged.fill(key, key[..., :3], positions=where)
    assert torch.equal(torch.as_tensor(ragged.kv_positions), where)
    with pytest.raises(ValueError, match="LatentCache: latent_dim must be an int of at least 1; got 0"):
        LatentCache(0)
