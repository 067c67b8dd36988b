"""Machine: the measured speed of operations on this machine, used to estimate the time of a run."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from saccade.costs.dry_run import DryRun, Operation, dry
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
from saccade.support.columns import display_width, left_aligned
from saccade.support.errors import unsupported
from saccade.support.language import translated

FACTOR = 1.5
"""Error factor of an estimate in both directions; `python -m benchmarks costs` compares it with measurements."""
_VERSION = 1


class Seconds(NamedTuple):
    """Estimated seconds of a forward pass, a training step and a decoding step, within a factor of about `FACTOR`."""

    forward: float
    training: float
    decode: float | None

    def __str__(self) -> str:
        times = {translated(name): time for name, time in self._asdict().items() if time is not None}
        width = max(map(display_width, times))
        lines = []
        for name, time in times.items():
            limits = translated("{least} to {most}", least=_time(time / FACTOR), most=_time(time * FACTOR))
            lines.append(f"{left_aligned(name, width)}  {_time(time):>8}  ({limits})")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


class Machine:
    """Measured times of operations on this machine's processor; each kind of operation is measured when first needed.

    Args:
        file: the file that stores measurements between runs; None to keep them only in memory.

    Cost: a second or two for each kind of operation, once per number of threads.

    Example:
        >>> machine = this_machine()
        >>> machine.seconds([])
        0.0
    """

    def __init__(self, file: MachineFile | None = None) -> None:
        self._file = file
        self._measurements: dict[str, list[list[float]]] = {} if file is None else file.read()

    def seconds(self, steps: Iterable[Operation]) -> float:
        """Return the estimated time of a sequence of operations on the machine."""
        steps = list(steps)
        starts = sum(step.kernel is None for step in steps)  # the time of a kernel includes its startup overhead
        return sum(map(self._operation_seconds, steps)) + (starts * self._overhead() if starts else 0.0)

    def _overhead(self) -> float:
        """Return the measured overhead per operation when Python runs many small operations in a row."""
        return self._measured("start", self._measure_overhead)[0][0]

    def _measure_overhead(self) -> list[list[float]]:
        run = DryRun()
        with dry(run, FakeTensorMode(allow_non_fake_inputs=True)):
            small_operations()
        return [[max(0.0, timed(small_operations) - sum(map(self._operation_seconds, run.steps))) / len(run.steps)]]

    def _operation_seconds(self, step: Operation) -> float:
        """Return the estimated time of an operation without its startup overhead."""
        if step.kernel is not None:
            return self._attention(step, step.kernel)
        if step.flops:
            return max(self._product(step), self._stream(step.moved, step.dtype))
        if step.name in ELEMENTWISE:
            name = f"elementwise/{step.name}/{step.dtype}"
            return _interpolate(self._measured(name, partial(elementwise, step.name, step.dtype)), step.size)
        return self._stream(step.moved, step.dtype)

    def _stream(self, moved: int, dtype: str) -> float:
        return _interpolate(self._measured("stream/float32", streams), moved)

    def _product(self, step: Operation) -> float:
        """Return the estimated time of a matrix product from the measured rates of products with the nearest shapes."""
        kind = "batched" if step.shape[0] > 1 else "single"
        samples = self._measured(f"product/{kind}/{step.dtype}", partial(products, kind, step.dtype))
        sizes = [math.log2(max(1, x)) for x in step.shape]
        total = weights = 0.0
        for *shape, rate in samples:
            distance = sum((math.log2(x) - y) ** 2 for x, y in zip(shape, sizes, strict=True))
            weight = 1.0 / (distance + 1e-3) ** 2
            total, weights = total + weight * math.log(rate), weights + weight
        return step.flops / math.exp(total / weights)

    def _attention(self, step: Operation, kernel: str) -> float:
        """Estimate the time of an attention product from a startup time, a time per tile and a time per pair."""
        way = "backward" if step.is_backward else "forward"
        name = f"attention/{kernel}/{way}/{step.dtype}"
        if "/" in kernel:
            reason = f"only attention with dot products is timed, not with {kernel.partition('/')[2]}"
            raise unsupported("subject", [reason], hint="its operations and its memory are still reported")
        samples = self._measured(name, partial(attention_samples, kernel, step.dtype, is_backward=step.is_backward))
        start, narrow, wide, tile = (row[0] for row in samples[:4])
        share = (step.shape[1] - 2 * SIZES[0]) / (2 * SIZES[1] - 2 * SIZES[0])
        slope = wide - narrow
        pair = max(narrow / 2, narrow + share * slope)
        return start + step.size * pair + max(0, step.shape[0] - 1) * tile

    def _measured(self, name: str, measure: Callable[[], list[list[float]]]) -> list[list[float]]:
        key = f"{name}/{torch.get_num_threads()} threads"
        if key not in self._measurements:
            with torch.random.fork_rng(devices=[]):
                self._measurements[key] = measure()
            if self._file is not None:
                self._file.write(self._measurements)
        return self._measurements[key]


def this_machine() -> Machine:
    """Return the machine that this process runs on, with its measurements."""
    if not _HERE:
        _HERE.append(Machine(MachineFile.here()))
    return _HERE[0]


_HERE: list[Machine] = []


def _interpolate(points: list[list[float]], at: float) -> float:
    """Interpolate the time of an operation between measured sizes; beyond the largest, it is proportional to the size.

    Below the smallest measured size, the time is constant.
    """
    before, *others = points
    if at <= before[0]:
        return before[1]
    for size, time in others:
        if at <= size:
            share = (at - before[0]) / (size - before[0])
            return before[1] + share * (time - before[1])
        before = [size, time]
    return before[1] * at / before[0]


class MachineFile(NamedTuple):
    """A file with a machine's measurements; a damaged file, or one from a different machine, is ignored."""

    path: Path

    @classmethod
    def here(cls) -> MachineFile:
        """Return this machine's file in ``$SACCADE_CACHE``, ``$XDG_CACHE_HOME/saccade`` or ``~/.cache/saccade``."""
        folder = os.environ.get("SACCADE_CACHE")
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        name = hashlib.sha256(json.dumps(_machine_key()).encode()).hexdigest()[:16]
        return cls((Path(folder) if folder else base / "saccade") / f"machine-{name}.json")

    def read(self) -> dict[str, list[list[float]]]:
        """Return the machine's stored measurements, or an empty dict if the file is missing or invalid."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            measurements = content["measured"]
            if content["machine"] == _machine_key() and content["sum"] == _sum(measurements):
                return {str(name): [[float(x) for x in row] for row in rows] for name, rows in measurements.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        return {}

    def write(self, measurements: dict[str, list[list[float]]]) -> None:
        """Write the machine's measurements atomically; if writing fails, the next process measures again."""
        text = json.dumps({"machine": _machine_key(), "measured": measurements, "sum": _sum(measurements)})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as file:
                file.write(text)
            Path(file.name).replace(self.path)
        except OSError:
            return


def _machine_key() -> dict[str, object]:
    """Return the properties of the machine that affect its measurements, except the number of threads."""
    return {
        "version": _VERSION,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "level": torch.backends.cpu.get_cpu_capability(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _sum(measurements: object) -> str:
    return hashlib.sha256(json.dumps(measurements, sort_keys=True).encode()).hexdigest()
