"""How things are measured: sides alternated, medians of ratios, repeated while the machine is disturbed."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

Call = Callable[[], object]


class Pair(NamedTuple):
    """Two sides of one question, in seconds: medians, and the median of the ratios run by run."""

    ours: float
    theirs: float
    ratio: float
    """theirs / ours: how many times faster ours is."""


def seconds(call: Call) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(ours: Call, theirs: Call, *, runs: int, warm_up: int = 1) -> Pair:
    """Run the two sides in turn, A B A B ..."""
    for _ in range(warm_up):
        ours()
        theirs()
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(runs)]
    return Pair(
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(b / a for a, b in pairs),
    )


def matmul_rate(size: int = 2048) -> float:
    """FLOP/s of a dense float32 product right now: the reference by which a disturbed machine is noticed."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    torch.mm(a, b)
    return 2 * size**3 / statistics.median(seconds(lambda: torch.mm(a, b)) for _ in range(5))


def undisturbed(measure: Callable[[], Pair], *, peak: float, tries: int = 4) -> tuple[Pair, bool]:
    """Repeat a measurement until the dense product before and after it runs at 80 % of its peak or more.

    Returns:
        The last measurement, and whether the machine was quiet during it.
    """
    for _ in range(tries):
        before = matmul_rate()
        pair = measure()
        if min(before, matmul_rate()) >= 0.8 * peak:
            return pair, True
    return pair, False


def extra_bytes(code: str) -> int:
    """Peak resident memory that ``run()`` adds to that of its inputs, in a fresh process (Linux).

    Args:
        code: defines inputs and a function ``run``; it may warm up what should not count.
    """
    program = f"""
import gc, re
def status(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read()).group(1)) * 1024
{code}
gc.collect()
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
result = run()
print(status("VmHWM") - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return int(done.stdout)
