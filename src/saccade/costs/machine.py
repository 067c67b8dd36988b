"""Machine: how long operations take here, measured once, so that the time of a run can be told before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from saccade.costs.dry_run import DryRun, dry
from saccade.costs.machine_cache import MachineFile
from saccade.costs.microbenchmarks import (
    ELEMENTWISE,
    SIZES,
    attention_samples,
    elementwise,
    products,
    small_operations,
    streams,
    timed,
)
from saccade.costs.operation import Step
from saccade.support.errors import unsupported

__all__ = ["FACTOR", "Machine", "this_machine"]

FACTOR = 1.5
"""By how much a prediction may be off, each way; `python -m benchmarks costs` compares it with what is measured."""

Point = tuple[float, float]


class Machine:
    """Times of operations on this machine's processor, each kind measured when it is first asked for, and kept.

    Args:
        file: where measurements are kept between runs; None to keep them in memory.

    Cost: to measure a kind takes a second or two, once. The number of threads is part of what is kept.

    Example:
        >>> machine = this_machine()
        >>> machine.seconds([])
        0.0
    """

    def __init__(self, file: MachineFile | None = None) -> None:
        self._file = file
        self._known: dict[str, list[list[float]]] = {} if file is None else file.read()

    def seconds(self, steps: Iterable[Step]) -> float:
        """How long these operations take, one after another."""
        steps = list(steps)
        started = sum(step.kernel is None for step in steps)  # what starts a kernel is part of its time
        return sum(map(self.of_step, steps)) + (started * self._start() if started else 0.0)

    def _start(self) -> float:
        """What an operation takes beyond what it computes, where Python makes many small ones one after another."""
        return self._measured("start", self._starts)[0][0]

    def _starts(self) -> list[list[float]]:
        run = DryRun()
        with dry(run, FakeTensorMode(allow_non_fake_inputs=True)):
            small_operations()
        return [[max(0.0, timed(small_operations) - sum(map(self.of_step, run.steps))) / len(run.steps)]]

    def of_step(self, step: Step) -> float:
        """How long one operation takes, its start aside."""
        if step.kernel is not None:
            return self._attention(step, step.kernel)
        if step.flops:
            return max(self._product(step), self._stream(step.moved, step.dtype))
        if step.name in ELEMENTWISE:
            name = f"elementwise/{step.name}/{step.dtype}"
            return _between(self._measured(name, partial(elementwise, step.name, step.dtype)), step.size)
        return self._stream(step.moved, step.dtype)

    def _stream(self, moved: int, dtype: str) -> float:
        return _between(self._measured("stream/float32", streams), moved)

    def _product(self, step: Step) -> float:
        """By the rates of the products that are most alike."""
        kind = "batched" if step.shape[0] > 1 else "single"
        found = self._measured(f"product/{kind}/{step.dtype}", partial(products, kind, step.dtype))
        own = [math.log2(max(1, x)) for x in step.shape]
        total = weights = 0.0
        for *shape, rate in found:
            far = sum((math.log2(x) - y) ** 2 for x, y in zip(shape, own, strict=True))
            weight = 1.0 / (far + 1e-3) ** 2
            total, weights = total + weight * math.log(rate), weights + weight
        return step.flops / math.exp(total / weights)

    def _attention(self, step: Step, kernel: str) -> float:
        """A start, so much for each tile, and for each pair what its width costs."""
        way = "backward" if step.is_backward else "forward"
        name = f"attention/{kernel}/{way}/{step.dtype}"
        if "/" in kernel:
            reason = f"it is measured how long products of a dot product take, not those of {kernel.partition('/')[2]}"
            raise unsupported("subject", [reason], hint="its operations and its memory are told all the same")
        found = self._measured(name, partial(attention_samples, kernel, step.dtype, is_backward=step.is_backward))
        start, narrow, wide, tile = (row[0] for row in found[:4])
        share = (step.shape[1] - 2 * SIZES[0]) / (2 * SIZES[1] - 2 * SIZES[0])
        slope = wide - narrow
        pair = max(narrow / 2, narrow + share * slope)
        return start + step.size * pair + max(0, step.shape[0] - 1) * tile

    def _measured(self, name: str, measure: Callable[[], list[list[float]]]) -> list[list[float]]:
        key = f"{name}/{torch.get_num_threads()} threads"
        if key not in self._known:
            with torch.random.fork_rng(devices=[]):
                self._known[key] = measure()
            if self._file is not None:
                self._file.write(self._known)
        return self._known[key]


def this_machine() -> Machine:
    """The machine that this runs on, with what has been measured of it so far."""
    if not _HERE:
        _HERE.append(Machine(MachineFile.here()))
    return _HERE[0]


_HERE: list[Machine] = []


def _between(points: list[list[float]], at: float) -> float:
    """A time between those of two sizes, along a straight line; in proportion beyond the last."""
    (first, least), *others = points
    if at <= first:
        return least
    before: Any = (first, least)
    for size, time in others:
        if at <= size:
            share = (at - before[0]) / (size - before[0])
            return before[1] + share * (time - before[1])
        before = (size, time)
    return before[1] * at / before[0]
