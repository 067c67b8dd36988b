"""One rank's own program among 1,024, over torch's pretended process group: whom it talks to, and how much."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from saccade import masks
from saccade.distributed import ContextParallel, exchange

RANKS, N, WINDOW = 1024, 1 << 20, 4096


@pytest.fixture
def among_many():
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=RANKS)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("among_many")
def test_a_window_talks_to_four_neighbours(monkeypatch):
    sent, got = {}, {}
    original = dist.batch_isend_irecv

    def listening(asked):
        for one in asked:
            where = sent if one.op is dist.isend else got
            where[one.peer] = where.get(one.peer, 0) + one.tensor.numel() * one.tensor.element_size()
        return original(asked)

    monkeypatch.setattr(dist, "batch_isend_irecv", listening)
    cp = ContextParallel(strategy="fetch", checks=False)  # nobody answers
    mask = masks.sliding_window(WINDOW)
    query, key, value = (torch.randn(1, 2, N // RANKS, 16, requires_grad=True) for _ in range(3))
    out = cp.attention(query, key, value, mask)
    plan = exchange(mask, N, 2, 2, 16, torch.float32, RANKS, layout="contiguous", strategy="fetch")
    own = plan.rank(5)
    assert sorted(sent) == sorted({peer for peer, _ in own.sends}) == [6, 7, 8, 9]
    assert sorted(got) == sorted({peer for peer, _ in own.receives}) == [1, 2, 3, 4]
    assert sum(sent.values()) == own.bytes_sent == (WINDOW - 1) * plan.bytes_of_token
    assert sum(got.values()) == own.bytes_received
    sent.clear()
    out.sum().backward()
    assert sorted(sent) == [1, 2, 3, 4]  # gradients go back where keys came from
    assert sum(sent.values()) == own.bytes_received
    assert key.grad.shape == key.shape
