"""Caches that forget by position: where tokens may stand, which slots they take, and what is copied."""

import pytest
import torch
from torch import Tensor

from saccade import masks
from saccade.caches import LayerCache, SinkWindowCache
from saccade.mechanisms import Softmax

SOFTMAX, CAUSAL = Softmax(), masks.Causal()


def _qkv(length: int, batch: int = 2) -> list[Tensor]:
    return [torch.randn(batch, heads, length, 4) for heads in (4, 2, 2)]


def _attend(cache: LayerCache, length: int, where: object = None, batch: int = 2) -> Tensor:
    return cache.attend(SOFTMAX, *_qkv(length, batch), mask=CAUSAL, positions=where)


def test_positions_one_by_one_may_be_written_out() -> None:
    cache = SinkWindowCache(2, 5)
    _attend(cache, 4, torch.arange(4).expand(2, -1))
    _attend(cache, 1, torch.tensor([4]))
    assert cache.traffic.bytes_read == 5 * 2 * 2 * 4 * 4 * 2  # the slots in use
    cache.crop(3)
    assert (cache.length, cache.positions(1)) == (3, range(3, 4))


@pytest.mark.parametrize("where", [[3, 4, 5, 6], [0, 1, 4, 5], [1, 2, 3, 4]], ids=str)
def test_there_is_no_way_back_where_tokens_stand_elsewhere(where: list[int]) -> None:
    cache = SinkWindowCache(2, 5)
    _attend(cache, 4, torch.tensor(where))
    with pytest.raises(NotImplementedError, match="are not at positions 0, 1, 2"):
        cache.crop(3)


def test_a_fork_copies_once_and_writes_nowhere_else() -> None:
    cache, same = SinkWindowCache(2, 5), SinkWindowCache(2, 5)
    first, step = _qkv(9), _qkv(1)
    for one in (cache, same):
        one.attend(SOFTMAX, *first, mask=CAUSAL)
    fork = cache.fork()
    _attend(fork, 1)
    places = [fork._state[name].data_ptr() for name in ("keys", "values", "table")]
    _attend(fork, 1)
    assert [fork._state[name].data_ptr() for name in ("keys", "values", "table")] == places
    torch.testing.assert_close(
        cache.attend(SOFTMAX, *step, mask=CAUSAL), same.attend(SOFTMAX, *step, mask=CAUSAL), atol=0, rtol=0
    )


@pytest.mark.parametrize("sinks, window", [(0, 3), (2, 5), (4, 1)])
def test_no_slot_is_written_twice_in_a_call(sinks: int, window: int) -> None:
    cache, table = SinkWindowCache(sinks, window), torch.arange(20).expand(2, -1)
    kept = cache._slots_to_write(None, table, 1 << 62)
    assert kept is not None
    rows, columns, slots = kept
    for row in range(2):
        expected = [*range(sinks), *range(20 - window, 20)]
        assert columns[rows == row].tolist() == expected
        assert sorted(slots[rows == row].tolist()) == list(range(sinks + window))


@pytest.mark.parametrize("table", [[[0, 0]], [[1, 1]], [[2, 1]], [[0, -1, 0]], [[3, -1, 3]], [[0, 1], [4, 4]]], ids=str)
def test_a_table_in_which_a_token_stands_before_another_is_refused(table: list[list[int]]) -> None:
    cache, where = SinkWindowCache(1, 8), torch.tensor(table)
    with pytest.raises(ValueError, match="positions must increase and come after those in the cache"):
        _attend(cache, where.shape[1], where, len(table))
    assert cache.length == 0


@pytest.mark.parametrize("table", [[[0, -1], [3, 4]], [[3, 4], [2, 3]], [[3, -1], [-1, 1]]], ids=str)
def test_later_tokens_of_a_ragged_batch_come_after_those_of_their_item(table: list[list[int]]) -> None:
    cache = SinkWindowCache(1, 8)
    _attend(cache, 3, torch.tensor([[0, 1, 2], [0, 1, 2]]))
    assert cache.positions(1) == range(3, 4)
    with pytest.raises(ValueError, match="increase and come after those in the cache"):
        _attend(cache, 2, torch.tensor(table))
    assert cache.positions(1) == range(3, 4)


def test_equal_ends_are_one_number() -> None:
    for batch in (1, 2):
        cache = SinkWindowCache(1, 8)
        _attend(cache, 3, torch.tensor([[-1, 0, 4]] * batch), batch)
        assert cache.positions(2) == range(5, 7)
        assert cache.nbytes == batch * 2 * 9 * 4 * 4 * 2 + batch * 9 * 8
    ragged = SinkWindowCache(1, 8)
    _attend(ragged, 3, torch.tensor([[0, 1, 2], [-1, -1, 0]]))
    assert ragged.positions(1).tolist() == [[3], [1]]


def test_an_empty_call_of_an_empty_batch_changes_nothing() -> None:
    cache = SinkWindowCache(1, 3)
    _attend(cache, 0, torch.empty(0, 0, dtype=torch.int64), batch=0)
    assert cache.positions(2) == range(2)
    assert _attend(cache, 3).shape == (2, 4, 3, 4)


def test_positions_in_a_range_behind_those_in_a_table_stand_where_the_keys_are() -> None:
    outs, first, step = [], _qkv(3), _qkv(1)
    for device in ("cpu", "meta"):
        cache = SinkWindowCache(1, 8)
        where = torch.tensor([[0, 1, 2], [-1, 0, 1]])
        with torch.device(device):
            cache.attend(SOFTMAX, *first, mask=CAUSAL, positions=where)
            outs.append(cache.attend(SOFTMAX, *step, mask=CAUSAL, positions=range(5, 6)))
    torch.testing.assert_close(outs[1], outs[0])
