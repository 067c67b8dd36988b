"""Threads that share the calls of the fused kernel give the same bits in any order, and errors reach the caller."""

import _thread
import dataclasses
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from tests.engine.kernels.shared_threads import MASK, N, Seen, alone, assert_same, inputs, results, sharing
from tests.sampled import sampled
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.engine.kernels import fused_threads
from saccade.testing import oracle


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    with sharing(monkeypatch) as found:
        yield found


MASKS = [
    MASK,
    masks.longformer(64, [0, 500]),
    masks.bigbird(32, random_blocks=2),
    masks.sparse_transformer(31),  # tiles that overlap
    masks.Documents([300, 20, 320, 320], rule=masks.Causal()),  # a few large ones
    masks.Documents([300, 660], rule=~masks.Causal()),  # rows that see nothing
    masks.Causal() & masks.Padding([N, 700], side="left", padded_len=N),
    MASK & masks.Dense(torch.rand(N, N) < 0.7),
]


@pytest.mark.ci
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", sampled(MASKS, 3), ids=str)
def test_the_same_bits_whoever_is_first(mask: masks.Mask, dtype: torch.dtype, seen: Seen) -> None:
    its = inputs(dtype=dtype)
    expected = alone(its, mask)
    assert not seen.others
    for delays in ((0.0,), (0.0, 0.004), (0.003, 0.0, 0.0, 0.001)):
        seen.calm, turns = len(delays) - 1, iter(range(10**6))
        seen.before = lambda delays=delays, turns=turns: time.sleep(delays[next(turns) % len(delays)])
        assert_same(results(its, mask), expected)
    assert len(seen.others) > 1
    assert {seen.threads[other] for other in seen.others} == {1}
    if dtype == torch.float32:
        dense, _ = oracle.attention(*its, mask.to_dense(N, batch=2, heads=4).expand(2, 4, N, N))
        torch.testing.assert_close(expected[0].double(), dense, rtol=1e-4, atol=1e-5)


def test_one_head_and_a_bias(seen: Seen) -> None:
    its, bias = inputs(heads=1, kv_heads=1), torch.randn(1, 1, N, N)
    assert_same(results(its, bias=bias), alone(its, bias=bias))
    assert seen.others


def test_the_number_of_threads_stays_what_it_was(seen: Seen) -> None:
    found: list[int] = []
    for threads in (2, 3, 1, 4):
        torch.set_num_threads(threads)
        seen.threads.clear()
        results(inputs(4000))
        assert torch.get_num_threads() == threads
        assert bool(seen.others) == (threads > 1)
        other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        other.start()
        other.join()
    assert found == [2, 3, 1, 4]


def test_few_large_tiles_are_cut_by_heads(seen: Seen) -> None:
    its, mask = inputs(), masks.Documents([500, 20, 440], rule=masks.Causal())
    assert_same(results(its, mask), alone(its, mask))
    assert len(seen.others) > 1


CAUSAL = masks.Documents([5000, 3000, 192], rule=masks.Causal())


@pytest.mark.parametrize(
    "mask, n, threads, shared",
    [
        (masks.Window(256, 256), 8192, 2, 2),
        (masks.Window(256, 256), 8192, 1, 1),
        (masks.Window(64, 64), 512, 2, 1),  # too little
        (CAUSAL, 8192, 2, 2),
        (CAUSAL, 8192, 3, 1),  # four heads do not fall into three parts
        (masks.Window(256, 256) & masks.Predicate(lambda b, h, q, kv: q != kv), 8192, 2, 1),
    ],
)
def test_which_calls_may_share_threads(
    mask: masks.Mask, n: int, threads: int, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    torch.set_num_threads(threads)
    x = torch.zeros(1, 4, 1, 64).expand(1, 4, n, 64)
    assert fused_threads.threads_for(sc.AttentionMatrix(x, x, mask).inputs) == shared


def test_when_others_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    resource = pytest.importorskip("resource")
    now, count, watch = [100.0], [5], fused_threads._PreemptionMonitor()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_nivcsw=count[0]))
    found = []
    for seconds, more in ((0.0, 0), (0.03, 2), (0.03, 5), (0.001, 0), (0.05, 5), (0.03, 9), (2.0, 20)):
        now[0] += seconds
        count[0] += more
        found.append(watch.is_frequent(2))
    assert found == [False, False, True, True, False, True, False]


class Interrupted(BaseException):
    """An exception that ``except Exception`` does not catch."""


@pytest.mark.parametrize("kind", [ValueError, Interrupted, KeyboardInterrupt])
@pytest.mark.parametrize("turn", [0, 3])
def test_an_error_on_a_thread_reaches_the_caller(kind: type[BaseException], turn: int, seen: Seen) -> None:
    its, turns = inputs(), iter(range(10**6))
    expected = alone(its)

    def fail() -> None:
        if next(turns) == turn:
            raise kind("on a thread")

    seen.before = fail
    with pytest.raises(kind, match="on a thread"):
        results(its)
    calls = next(turns)
    time.sleep(0.02)
    assert next(turns) == calls + 1  # no thread goes on
    assert_same(results(its), expected)


def test_an_interrupt_ends_the_wait(seen: Seen) -> None:
    its, turns = inputs(), iter(range(10**6))
    expected = alone(its)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be switched off

    def interrupt() -> None:
        if next(turns) == 0:
            _thread.interrupt_main()
        time.sleep(0.01)

    seen.before = interrupt
    try:
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            results(its)
    finally:
        signal.signal(signal.SIGINT, before)
    calls = next(turns)
    time.sleep(0.05)
    assert next(turns) == calls + 1
    seen.before = lambda: None
    assert_same(results(its), expected)


@dataclasses.dataclass(frozen=True)
class Asking(masks.Mask):
    """A mask that computes attention itself when it is read."""

    size: int

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        x = torch.ones(1, 4, N, 16)
        near = sc.attention(x, x, x, MASK, impl="fused")[0, 0, 0, 0] > 0.5
        return ((q - kv).abs() < self.size) & near


def test_a_product_inside_of_a_product(seen: Seen) -> None:
    its = inputs()
    expected = alone(its, Asking(9) & MASK)
    masks.plan_cache._cached_plan.cache_clear()
    assert_same(results(its, Asking(9) & MASK), expected)
    assert seen.others
    torch.testing.assert_close(expected, alone(its, masks.Window(8, 8) & MASK), rtol=1e-4, atol=1e-4)


def test_several_threads_of_a_user_at_a_time() -> None:
    its = [inputs() for _ in range(4)]
    expected, wrong = [alone(x) for x in its], []

    def work(number: int) -> None:
        for turn in range(6):
            masks.plan_cache._cached_plan.cache_clear()
            torch.set_num_threads(2 + (number + turn) % 3)
            if not all(torch.equal(a, b) for a, b in zip(results(its[number]), expected[number], strict=True)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_parts_that_wait_for_a_slow_one_are_few(seen: Seen) -> None:
    lock, turns, begun = threading.Lock(), iter(range(10**6)), []

    def slow() -> None:
        with lock:
            turn = next(turns)
        if turn == 0:
            time.sleep(0.3)
            begun.append(next(turns))

    seen.before = slow
    with torch.no_grad():
        sc.attention(*inputs(8000), masks.Window(8, 8), impl="fused")
    assert begun[0] <= 2 * 2 + fused_threads._AHEAD < next(turns) / 2


def test_memory_is_counted_for_all_threads(seen: Seen) -> None:
    its = [x.detach() for x in inputs(4000)]
    together = sc.AttentionMatrix(*its[:2], MASK, impl="fused").explain().extra_bytes
    torch.set_num_threads(1)
    masks.plan_cache._cached_plan.cache_clear()
    assert 1.5 < together / sc.AttentionMatrix(*its[:2], MASK, impl="fused").explain().extra_bytes < 2.5
