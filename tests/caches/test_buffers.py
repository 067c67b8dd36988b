"""Memory on huge pages: ordinary in every way but speed."""

import copy
import mmap
from pathlib import Path

import pytest
import torch

from saccade.caches import KVCache, buffers
from saccade.caches.buffers import empty, reused, usable

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
@pytest.mark.parametrize("size", [HUGE, HUGE + 4096, HUGE * 5 // 2], ids=str)
def test_it_begins_with_a_huge_page_and_asks_for_whole_ones(size: int) -> None:
    asked = []

    class Room(mmap.mmap):
        def madvise(self, *args: int) -> None:
            asked.append(args)
            super().madvise(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers.mmap, "mmap", Room)
        made = empty(torch.empty(0), (size // 4,))
    assert made.data_ptr() % HUGE == 0
    (advice, start, length), *others = asked
    assert not others
    assert advice == mmap.MADV_HUGEPAGE
    assert start < HUGE
    assert length == size // HUGE * HUGE
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [(*(int(end, 16) for end in place.split("-")), access) for place, access, *_ in maps]
    (access,) = [access for first, stop, access in ranges if first <= made.data_ptr() < stop]
    assert access[3] == "p"  # private: a child of this process does not write into it


@needs_advice
def test_small_buffers_are_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers.mmap, "mmap", None)
    assert empty(torch.empty(0), (HUGE // 4 - 1,)).numel() == HUGE // 4 - 1


@needs_advice
def test_a_system_without_huge_pages_gives_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Room(mmap.mmap):
        def madvise(self, *args: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(buffers.mmap, "mmap", Room)
    assert empty(torch.empty(0), (HUGE,)).fill_(1.0).sum().item() == HUGE


def test_without_madvise_torch_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_ADVICE", None)
    monkeypatch.setattr(buffers.mmap, "mmap", None)
    assert empty(torch.empty(0), (HUGE,)).numel() == HUGE


def test_fake_tensors_get_fake_buffers() -> None:
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


def test_failed_allocations_raise_torch_errors() -> None:
    with pytest.raises(RuntimeError, match=r"can't allocate memory|Storage size"):
        empty(torch.empty(0), (1 << 55,))


def test_a_tensor_is_copied_only_where_its_mode_is_over() -> None:
    plain = torch.randn(3)
    with torch.inference_mode():
        assert usable(plain) is plain
        made = torch.randn(3)
        assert usable(made) is made
    assert usable(plain) is plain
    copy_of = usable(made)
    assert not copy_of.is_inference()
    assert torch.equal(copy_of, made)


@pytest.fixture
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_BUFFERS", buffers._ThreadBuffers())


@pytest.mark.usefixtures("_nothing_kept")
def test_memory_is_used_again_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_MAX_REUSED", 48)
    like = torch.empty(0)
    made = reused("test", (2, 5), like)
    assert (made.shape, made.dtype) == ((2, 5), like.dtype)
    for shape in ((2, 5), (3,)):
        assert reused("test", shape, like).data_ptr() == made.data_ptr()
    assert reused("test", (5,), like.double()).data_ptr() == made.data_ptr()
    largest = reused("test", (3, 4), like)
    assert largest.data_ptr() != made.data_ptr()
    assert reused("test", (12,), like).data_ptr() == largest.data_ptr()
    assert reused("another", (12,), like).data_ptr() != largest.data_ptr()
    larger = [reused("test", (13,), like) for _ in range(2)]
    assert len({x.data_ptr() for x in (*larger, largest)}) == 3


@pytest.mark.usefixtures("_nothing_kept")
@pytest.mark.parametrize("kept", [0, 1 << 26])
def test_memory_that_is_used_again_stands_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    monkeypatch.setattr(buffers, "_MAX_REUSED", kept)
    like = torch.empty(0)
    with torch.device("meta"):
        made = reused("where", (3,), like)
    assert made.device.type == "cpu"


@pytest.mark.usefixtures("_nothing_kept")
def test_memory_that_was_taken_in_inference_mode_is_of_use_outside_of_it() -> None:
    like = torch.empty(0)
    with torch.inference_mode():
        reused("mode", (3,), like)
    assert reused("mode", (3,), like).fill_(2.0).sum() == 6
    # Torch takes a view as another dtype for an ordinary tensor; what it is a view of shall be one, too.
    assert not buffers._BUFFERS.pieces["mode", like.device].is_inference()
