"""Arguments of a cache are checked before anything is stored, and are passed on unchanged."""

from typing import ClassVar

import pytest
import torch
from tests.caches.cache_kinds import KINDS
from torch import Tensor

from saccade import masks
from saccade.caches import Call, CompressiveCache, CrossCache, KVCache, LayerCache, padded_positions
from saccade.mechanisms import CompressiveMemory, Softmax

CAUSAL = masks.Causal()


@pytest.mark.parametrize(
    "which, axis", [(which, axis) for which in range(3) for axis in (0, 1, 2) if (which, axis) != (0, 1)]
)
def test_one_size_that_differs_is_refused_where_all_others_are_equal(which: int, axis: int) -> None:
    given, cache = [torch.randn(3, 3, 3, 3) for _ in range(3)], KVCache()
    given[which] = given[which].narrow(axis, 0, 2)
    if (which, axis) == (1, 1):
        given[0] = given[0][:, :2]  # heads that would fit
    with pytest.raises(ValueError, match=r"KVCache\.attend: (key|value) must have shape"):
        cache.attend(Softmax(), *given)
    assert (cache.length, cache.nbytes) == (0, 0)


@pytest.mark.parametrize("others", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("dims", [3, 5])
def test_tensors_of_other_dimensions_are_refused(dims: int, others: tuple[int, ...]) -> None:
    given = [torch.randn(2, 2, 3, 4) for _ in range(3)]
    for which in others:
        given[which] = given[which][..., 0] if dims == 3 else given[which][..., None]
    with pytest.raises(ValueError, match=r"KVCache\.attend: (query|key|value) must have shape"):
        KVCache().attend(Softmax(), *given)


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (1, 2)], ids=str)
def test_tensors_of_another_type_are_refused(which: tuple[int, ...]) -> None:
    given = [torch.randn(2, 2, 3, 4).to(torch.float64 if i in which else torch.float32) for i in range(3)]
    with pytest.raises(ValueError, match=r"KVCache\.attend: dtype must be the same for query, key and value"):
        KVCache().attend(Softmax(), *given)


class Asked(LayerCache):
    """A cache that stores the call it receives."""

    leaves: ClassVar = ()

    def advance(self, call: Call) -> Tensor:
        self.call = call
        return call.query


def test_no_rule_is_handed_on_as_none_and_any_other_as_a_mask() -> None:
    cache, x = Asked(), torch.randn(1, 2, 3, 4)
    for mask, kind in ((None, type(None)), (CAUSAL, masks.Causal), (lambda b, h, q, kv: kv <= q, masks.Predicate)):
        cache.attend(Softmax(), x, x, x, mask=mask)
        assert type(cache.call.mask) is kind


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_moved_before_the_first_call(kind: str) -> None:
    cache = KINDS[kind]()
    assert cache.traffic == (0, 0)
    cache.attend(Softmax(), *(torch.randn(1, heads, 3, 4) for heads in (4, 2, 2)), mask=CAUSAL)
    assert cache.traffic.bytes_appended >= 3 * 2 * 2 * 4 * 4


def test_a_context_refuses_a_tensor_mask_and_uses_its_positions() -> None:
    q, k, v = (torch.randn(2, heads, 5, 4) for heads in (4, 2, 2))
    cache = CrossCache()
    with pytest.raises(ValueError, match=r"CrossCache\.attend: mask must be a rule on positions"):
        cache.attend(Softmax(), q, k, v, mask=torch.ones(5, 5, dtype=torch.bool))
    assert not cache.is_filled
    cache.fill(k, v)
    for positions in (range(2, 7), torch.tensor([[0, 3, 1, -1, 4], [1, 1, 2, 0, 4]])):
        out = cache.attend(Softmax(), q, mask=CAUSAL, positions=positions)
        where = {"q_positions": positions, "kv_positions": range(5)}
        torch.testing.assert_close(out, Softmax()(q, k, mask=CAUSAL, **where) @ v)


@pytest.mark.parametrize("lengths", [[9, 4, 7], [9, 4]], ids=str)
def test_a_memory_holds_as_many_columns_as_its_longest_open_segment(lengths: list[int]) -> None:
    memory, cache, batch = CompressiveMemory(4, 5), CompressiveCache(), len(lengths)
    positions = torch.stack([torch.arange(9).where(torch.arange(9) < length, -1) for length in lengths])
    q, k, v = (torch.randn(batch, heads, 9, 4) for heads in (4, 2, 2))
    with torch.no_grad():
        cache.attend(memory, q, k, v, mask=CAUSAL, positions=positions)
    assert cache.kv_positions[:, :4].tolist() == [[5, 6, 7, 8], [0, 1, 2, 3], [5, 6, -1, -1]][:batch]
    assert cache.kv_positions.shape == (batch, 4)
    held = cache._state["keys"]
    torch.testing.assert_close(held[1], k[1, :, :4], atol=0, rtol=0)
    torch.testing.assert_close(held[0], k[0, :, 5:], atol=0, rtol=0)
    assert cache.traffic.bytes_appended == k.nbytes + v.nbytes


def test_a_long_open_segment_keeps_its_order() -> None:
    memory, cache = CompressiveMemory(2, 400), CompressiveCache()
    x = torch.randn(1, 2, 900, 4)
    is_token = torch.arange(900) % 3 > 0
    where = torch.where(is_token, is_token.cumsum(0) - 1, -1)
    with torch.no_grad():
        cache.attend(memory, x, x, x, mask=CAUSAL, positions=where)
    assert cache.kv_positions.tolist() == [list(range(400, 600))]
    torch.testing.assert_close(cache._state["keys"], x[:, :, where >= 400], atol=0, rtol=0)


@pytest.mark.parametrize("batch", [0, 2])
def test_a_memory_accepts_no_tokens_and_an_empty_batch(batch: int) -> None:
    memory, cache, plain = CompressiveMemory(4, 5), CompressiveCache(), CompressiveCache()
    cache.attend(memory, *(torch.randn(3, heads, 0, 4) for heads in (4, 2, 2)), mask=CAUSAL)  # says nothing of a batch
    for length in (7, 0, 1, 6, 0):
        qkv, before = [torch.randn(batch, heads, length, 4) for heads in (4, 2, 2)], cache.nbytes
        with torch.no_grad():
            out = cache.attend(memory, *qkv, mask=CAUSAL)
            if length:
                torch.testing.assert_close(out, plain.attend(memory, *qkv, mask=CAUSAL))
            else:
                assert (out.shape, cache.nbytes) == ((batch, 4, 0, 4), before)


def test_a_memory_of_ragged_texts_that_all_ended_goes_on() -> None:
    memory, cache = CompressiveMemory(4, 5), CompressiveCache()
    for batch, length, positions in ((2, 9, padded_positions([9, 4])), (0, 3, None), (0, 0, None), (0, 1, None)):
        qkv = [torch.randn(batch, heads, length, 4) for heads in (4, 2, 2)]
        assert cache.attend(memory, *qkv, mask=CAUSAL, positions=positions).shape == (batch, 4, length, 4)
        cache.reorder([])
    assert cache.length == 13
