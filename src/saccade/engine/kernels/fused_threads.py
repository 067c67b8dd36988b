"""Threads of the fused kernel, which run calls to torch's flash operation in parallel, each on one torch thread.

An operation on all of torch's threads takes as long as the slowest thread, so a product of many calls waits for all
threads once per call. While other processes are busy, some thread is preempted at almost any time, and such a product
takes many times longer than the loss of processor time explains. When the system reports preemptions, the remaining
calls of a product are therefore distributed over threads that each run complete calls. The results are added in a fixed
order, so they are bit-identical regardless of the thread that computes them.

These threads are not always faster, because OpenMP's threads stay active for a few milliseconds after each operation,
and our threads share the processor with them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

import torch

from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.fused_calls import Call, calls_of, tiles_of
from saccade.plan import Tile
from saccade.support.torch_modes import is_plain

try:
    import resource
except ImportError:  # Windows, which does not count preemptions
    resource = None  # type: ignore[assignment]

_SMALLEST_CALL = 1 << 20  # pairs times width of a call that takes about as long as Python needs to start it
# Pairs times width of all calls on a thread. Less work is finished before OpenMP's threads become inactive.
_SMALLEST_SHARE = 1 << 26
_AHEAD = 6  # number of results that may wait for an earlier call, in addition to the calls in progress
# Seconds between two measurements; preemptions per second and thread on a busy machine.
_INTERVAL, _BUSY_RATE = 0.02, 50

# Modes of torch and its profiler apply to one thread. If torch cannot report them, assume none.
_PROBE_NAMES = (
    (torch._C, "_len_torch_dispatch_stack"),
    (torch._C, "_len_torch_function_stack"),
    (torch.autograd, "_profiler_enabled"),
)
_MODE_PROBES = tuple(getattr(where, name, bool) for where, name in _PROBE_NAMES)
# With OpenMP, each thread has a separate thread count; otherwise, all threads share one.
_COUNTS_PER_THREAD = "backend: OpenMP" in torch.__config__.parallel_info()

Part = TypeVar("Part")


def each_call(inputs: AttentionInputs, compute: Callable[[Call], Part], add: Callable[[Call, Part], None]) -> None:
    """Run all calls to torch's flash operation, possibly on several threads, and add the results in a fixed order."""
    tiles, threads = iter(tiles_of(inputs)), threads_for(inputs)
    for tile in tiles:
        if threads > 1 and _preemption.is_frequent(threads):
            left = (part for whole in itertools.chain((tile,), tiles) for part in _split_heads(inputs, whole, threads))
            _Queue(threads, (call for part in left for call in calls_of(inputs, part)), compute, add).run()
            return
        for call in calls_of(inputs, tile):
            add(call, compute(call))


def threads_for(inputs: AttentionInputs) -> int:
    """Return the number of threads for a fused product; 1 if threads do not help or would change the result."""
    # A user's mask function may read thread-local data. Modes and profilers observe one thread only.
    if inputs.rule.calls_functions or not _COUNTS_PER_THREAD or any(probe() for probe in _MODE_PROBES):
        return 1
    threads, plan = torch.get_num_threads(), inputs.plan
    if threads == 1 or plan.count < 2 or not (is_plain(inputs.query) and is_plain(inputs.key)):
        return 1
    key = ("is shared", threads, inputs.key.shape[1], inputs.query.shape[3])
    if key not in plan.memo:
        sizes = [_pairs_of_tile(tile) for tile in plan.tiles]
        is_worth_it = sum(sizes) * inputs.query.shape[3] >= max(len(sizes) * _SMALLEST_CALL, threads * _SMALLEST_SHARE)
        parts = _num_head_parts(inputs, threads)
        is_even = parts == threads or 2 * threads * max(sizes) <= parts * sum(sizes)
        plan.memo[key] = is_worth_it and is_even
    return threads if plan.memo[key] else 1


def _split_heads(inputs: AttentionInputs, tile: Tile, threads: int) -> Iterator[Tile]:
    """Yield the tile itself or, if it is a large part of the fused product, its parts with fewer heads."""
    size = inputs.shape[1] // _num_head_parts(inputs, threads)
    if 4 * threads * _pairs_of_tile(tile) <= inputs.plan.pairs:
        size = inputs.shape[1]
    for start in range(tile.heads.start, tile.heads.stop, size):
        yield tile._replace(heads=slice(start, min(start + size, tile.heads.stop)))


def _num_head_parts(inputs: AttentionInputs, threads: int) -> int:
    """Return into how many groups of heads threads may split a tile; 1 if each part would recompute the mask."""
    return math.gcd(inputs.key.shape[1], threads) if inputs.rule.is_value else 1


def _pairs_of_tile(tile: Tile) -> int:
    items, heads = (span.stop - span.start for span in (tile.batch, tile.heads))
    return items * heads * tile.height * tile.width


class _PreemptionMonitor:
    """A monitor that measures how often the system preempts the threads of this process."""

    def __init__(self) -> None:
        self._time, self._count, self._is_frequent = -math.inf, 0, False

    def is_frequent(self, threads: int) -> bool:
        """Return whether the system preempted threads often, according to the last measurement."""
        now = time.monotonic()
        if resource is not None and now - self._time >= _INTERVAL:
            count = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
            self._is_frequent = count - self._count > max(2.0, _BUSY_RATE * threads * (now - self._time))
            self._time, self._count = now, count
        return self._is_frequent


_preemption = _PreemptionMonitor()


class _Queue(Generic[Part]):
    """A queue of calls to torch's flash operation. Threads fetch calls in order, and results are added in that order.

    A result that is ready before that of an earlier call is stored, and the thread of the earlier call adds both.
    Therefore, threads wait only if another thread is so far behind that too many results would be stored.
    """

    def __init__(
        self,
        threads: int,
        calls: Iterator[Call],
        compute: Callable[[Call], Part],
        add: Callable[[Call, Part], None],
    ):
        self._threads, self._calls, self._compute, self._add = threads, enumerate(calls), compute, add
        self._ready: dict[int, tuple[Call, Part]] = {}
        self._count = 0  # number of results added so far
        self._is_adding = self._is_over = False
        self._changed = threading.Condition()
        self._is_inference = torch.is_inference_mode_enabled()

    def run(self) -> None:
        """Run all calls in the queue. If a thread raises an error, raise it again after all threads have stopped."""
        jobs: list[Future[None]] = []
        try:
            with contextlib.suppress(RuntimeError):  # the interpreter is shutting down and cannot start threads
                pool = _pool_of(self._threads)
                for _ in range(self._threads):
                    jobs.append(pool.submit(self._work))
            if not jobs:
                self._work()
            wait(jobs, return_when=FIRST_COMPLETED)
            for job in jobs:
                if not job.cancel():  # a job that has not started by now would find no calls left
                    job.result()
        finally:
            self._end()
            wait([job for job in jobs if not job.cancel()])

    def _work(self) -> None:
        try:
            # Set this thread's modes; its other settings make no difference here.
            with torch.inference_mode(self._is_inference), torch.no_grad():
                while (taken := self._next()) is not None:
                    self._put(*taken, self._compute(taken[1]))
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _next(self) -> tuple[int, Call] | None:
        with self._changed:
            taken = None if self._is_over else next(self._calls, None)
            while taken is not None and not self._is_over and taken[0] - self._count >= self._threads + _AHEAD:
                self._changed.wait()
            return None if self._is_over else taken

    def _put(self, number: int, call: Call, part: Part) -> None:
        with self._changed:
            self._ready[number] = (call, part)
            del part  # free its memory as soon as it is added
            if self._is_adding:
                return
            self._is_adding = True
            while self._count in self._ready and not self._is_over:
                entry = self._ready.pop(self._count)
                self._changed.release()
                try:
                    self._add(*entry)
                    del entry
                finally:
                    self._changed.acquire()
                self._count += 1
                self._changed.notify_all()
            self._is_adding = False


_starting = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_size = 0


def _pool_of(threads: int) -> ThreadPoolExecutor:
    """Return the fused kernel's thread pool, after replacing it if it has fewer than ``threads`` threads."""
    global _pool, _size
    with _starting:
        if _pool is None or _size < threads:
            _pool, _size = _start_pool(threads), threads
        return _pool


def _start_pool(threads: int) -> ThreadPoolExecutor:
    pool, all_here = ThreadPoolExecutor(threads, "saccade", _use_one_torch_thread), threading.Barrier(threads)
    try:
        for job in [pool.submit(all_here.wait) for _ in range(threads)]:
            job.result()
    except BaseException:
        all_here.abort()
        raise
    finally:
        # A thread count set by any thread is the default of all later threads, so restore it.
        torch.set_num_threads(torch.get_num_threads())
    return pool


def _use_one_torch_thread() -> None:
    torch.get_num_threads()  # the first query copies the global setting, and would otherwise override the next line
    torch.set_num_threads(1)


def _forget_threads() -> None:
    """Discard the fused kernel's thread pool after a fork, because the new process does not have its threads."""
    global _starting, _pool, _size
    _starting, _pool, _size = threading.Lock(), None, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
