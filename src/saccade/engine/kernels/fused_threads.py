"""Calls of torch's flash operation on several threads, each of which has one of torch's.

An operation that torch runs on all of its threads ends when the last of them does, so a product of many calls waits for
all threads as often as it has calls. Beside other busy processes some thread is put aside at any time, and such a
product takes many times as long as its share of the processors would let it. Where the system is seen to put threads
aside, what is left of a product goes to threads that run calls of their own. What comes of them is added in one order,
so that results are the same to the bit, whoever ran them.

They are not always the better ones: threads of OpenMP stay awake for some milliseconds after each operation, which
others have to share a processor with.
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
except ImportError:  # on Windows, which does not count what is asked for here
    resource = None  # type: ignore[assignment]

_LEAST = 1 << 20  # pairs times width of a call: about as long as Python takes to make it
_ENOUGH = 1 << 26  # pairs times width of all calls of a thread: less is over before the threads of OpenMP are asleep
_AHEAD = 6  # calls that may be ready before one that is not, beside those that are being run
_LOOK, _OFTEN = 0.02, 50  # seconds between two looks; times a second that a thread is put aside where others are busy

# Modes of torch, and its profiler, are of one thread. Where torch does not say whether there are any, none is assumed.
_ASKED = (
    (torch._C, "_len_torch_dispatch_stack"),
    (torch._C, "_len_torch_function_stack"),
    (torch.autograd, "_profiler_enabled"),
)
_LISTENERS = tuple(getattr(where, name, bool) for where, name in _ASKED)
_OWN_NUMBERS = "backend: OpenMP" in torch.__config__.parallel_info()  # else torch has one number of threads for all

Part = TypeVar("Part")


def each_call(inputs: AttentionInputs, compute: Callable[[Call], Part], add: Callable[[Call, Part], None]) -> None:
    """Compute a part for every call, on whatever thread, and add the parts one by one, in the order of the calls."""
    tiles, threads = iter(tiles_of(inputs)), threads_for(inputs)
    for tile in tiles:
        if threads > 1 and _disturbance.is_seen(threads):
            left = (part for whole in itertools.chain((tile,), tiles) for part in _cut(inputs, whole, threads))
            _Queue(threads, (call for part in left for call in calls_of(inputs, part)), compute, add).run()
            return
        for call in calls_of(inputs, tile):
            add(call, compute(call))


def threads_for(inputs: AttentionInputs) -> int:
    """How many threads may share a product; one where they would gain nothing, or where it matters who computes it."""
    # A mask that is a function of a user's may read what belongs to a thread. Modes and profilers listen to one.
    if inputs.rule.asks_functions or not _OWN_NUMBERS or any(ask() for ask in _LISTENERS):
        return 1
    threads, plan = torch.get_num_threads(), inputs.plan
    if threads == 1 or plan.count < 2 or not (is_plain(inputs.query) and is_plain(inputs.key)):
        return 1
    key = ("is shared", threads, inputs.key.shape[1], inputs.query.shape[3])
    if key not in plan.memo:
        sizes = [_pairs(tile) for tile in plan.tiles]
        is_worth_it = sum(sizes) * inputs.query.shape[3] >= max(len(sizes) * _LEAST, threads * _ENOUGH)
        parts = _parts(inputs, threads)
        is_even = parts == threads or 2 * threads * max(sizes) <= parts * sum(sizes)
        plan.memo[key] = is_worth_it and is_even
    return threads if plan.memo[key] else 1


def _cut(inputs: AttentionInputs, tile: Tile, threads: int) -> Iterator[Tile]:
    """Cut a tile into parts of some heads each if it is a large part of the product."""
    size = inputs.shape[1] // _parts(inputs, threads)
    if 4 * threads * _pairs(tile) <= inputs.plan.pairs:
        size = inputs.shape[1]
    for start in range(tile.heads.start, tile.heads.stop, size):
        yield tile._replace(heads=slice(start, min(start + size, tile.heads.stop)))


def _parts(inputs: AttentionInputs, threads: int) -> int:
    """Parts that the heads of a tile may fall into: what a mask hides is computed for each, where it is not kept."""
    return math.gcd(inputs.key.shape[1], threads) if inputs.rule.is_value else 1


def _pairs(tile: Tile) -> int:
    items, heads = (span.stop - span.start for span in (tile.batch, tile.heads))
    return items * heads * tile.height * tile.width


class _Disturbance:
    """Whether threads of this process are put aside for others, as the system counts it."""

    def __init__(self) -> None:
        self._time, self._count, self._is_seen = -math.inf, 0, False

    def is_seen(self, threads: int) -> bool:
        """Whether it has happened often since the last look."""
        now = time.monotonic()
        if resource is not None and now - self._time >= _LOOK:
            count = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
            self._is_seen = count - self._count > max(2.0, _OFTEN * threads * (now - self._time))
            self._time, self._count = now, count
        return self._is_seen


_disturbance = _Disturbance()


class _Queue(Generic[Part]):
    """Calls that threads take in their order and compute, and whose parts are added in their order.

    A part that is ready before one in front of it is kept; whoever brings that one adds both. So nobody waits, unless
    some thread is so far behind that too many would be kept.
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
        self._count = 0  # of parts that have been added
        self._is_adding = self._is_over = False
        self._changed = threading.Condition()
        self._is_inference = torch.is_inference_mode_enabled()

    def run(self) -> None:
        """Until every part has been added; raises what is raised on any thread, once none of them is at work."""
        jobs: list[Future[None]] = []
        try:
            with contextlib.suppress(RuntimeError):  # Python is ending, and starts no thread any more
                pool = _pool_of(self._threads)
                for _ in range(self._threads):
                    jobs.append(pool.submit(self._work))
            if not jobs:
                self._work()
            wait(jobs, return_when=FIRST_COMPLETED)
            for job in jobs:
                if not job.cancel():  # one that has not begun by now would find no call
                    job.result()
        finally:
            self._end()
            wait([job for job in jobs if not job.cancel()])

    def _work(self) -> None:
        try:
            # What a thread has switched on is its own; the rest of it changes nothing here.
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
            del part  # once it is added, nobody holds it
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
    """So many threads that wait for work, or more."""
    global _pool, _size
    with _starting:
        if _pool is None or _size < threads:
            _pool, _size = _started(threads), threads
        return _pool


def _started(threads: int) -> ThreadPoolExecutor:
    pool, all_here = ThreadPoolExecutor(threads, "saccade", _leave_torch_one), threading.Barrier(threads)
    try:
        for job in [pool.submit(all_here.wait) for _ in range(threads)]:
            job.result()
    except BaseException:
        all_here.abort()
        raise
    finally:
        # What any thread sets is also what threads that are still to come begin with, and they are not ours.
        torch.set_num_threads(torch.get_num_threads())
    return pool


def _leave_torch_one() -> None:
    torch.get_num_threads()  # a thread takes over what others have set when it first asks, and would then forget this:
    torch.set_num_threads(1)


def _forget() -> None:
    """Forget the threads: a forked process has none of them."""
    global _starting, _pool, _size
    _starting, _pool, _size = threading.Lock(), None, 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
