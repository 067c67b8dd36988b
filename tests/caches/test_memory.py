"""Memory on huge pages: ordinary in every way but speed."""

import copy
import mmap
from pathlib import Path

import pytest
import torch

from saccade.caches import KVCache, memory
from saccade.caches.memory import empty

HUGE = 2 << 20
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8)
needs_advice = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="only Linux takes advice about pages")


@pytest.mark.parametrize("shape", [(0,), (3, 5), (HUGE // 4,), (1, 3, 300_000, 1), (2, 2, 1000, 700)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_holds_what_is_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = empty(torch.empty(0, dtype=dtype), shape)
    assert made.shape == shape
    assert made.dtype == dtype
    assert made.is_contiguous()
    given = torch.randint(-9, 9, shape).to(dtype)
    made.copy_(given)
    assert torch.equal(made, given)
    assert torch.equal(copy.deepcopy(made), given)


@needs_advice
def test_it_begins_with_a_huge_page_and_asks_for_whole_ones() -> None:
    asked = []

    class Room(mmap.mmap):
        def madvise(self, *args: int) -> None:
            asked.append(args)
            super().madvise(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory.mmap, "mmap", Room)
        made = empty(torch.empty(0), (HUGE // 4 * 5 // 2,))
    assert made.data_ptr() % HUGE == 0
    (advice, start, length), *others = asked
    assert not others
    assert advice == mmap.MADV_HUGEPAGE
    assert start < HUGE
    assert length == 2 * HUGE


@needs_advice
def test_a_system_without_huge_pages_gives_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Room(mmap.mmap):
        def madvise(self, *args: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(memory.mmap, "mmap", Room)
    assert empty(torch.empty(0), (HUGE,)).fill_(1.0).sum().item() == HUGE


def test_where_no_advice_can_be_given_torch_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_ADVICE", None)
    monkeypatch.setattr(memory.mmap, "mmap", None)
    assert empty(torch.empty(0), (HUGE,)).numel() == HUGE


def test_what_stands_for_a_tensor_gets_what_does() -> None:
    with torch._subclasses.FakeTensorMode():
        like = torch.empty(3)
        assert type(empty(like, (HUGE,))) is type(like)
    assert empty(torch.empty(0, device="meta"), (HUGE,)).device.type == "meta"


@needs_advice
def test_it_is_given_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    first = empty(torch.empty(0), (16 * HUGE // 4,)).fill_(1.0)
    full = resident()
    del first
    assert resident() < full - 8 * HUGE


def test_a_long_cache_counts_its_own_bytes() -> None:
    key = torch.randn(1, 2, 6000, 100)
    cache = KVCache()
    cache.fill(key, key)
    assert cache.nbytes == 2 * key.nbytes
    assert cache.key is not None
    assert torch.equal(cache.key, key)


def test_what_cannot_be_had_is_torchs_to_say() -> None:
    with pytest.raises(RuntimeError, match=r"can't allocate memory|Storage size"):
        empty(torch.empty(0), (1 << 55,))
