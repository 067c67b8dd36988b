"""Conditions of a run: a number of threads, a busy machine, no compiled kernel."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from saccade.engine.kernels import native, native_statistics

_SPIN = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


def thread_counts() -> list[int]:
    """Return the numbers of threads to try: one, two and all."""
    return sorted({1, min(2, os.cpu_count() or 1), os.cpu_count() or 1})


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Use a number of threads in torch's operations and in ours."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def busy(cores: int = 2) -> Iterator[None]:
    """Keep a number of cores busy with another process, which ends with this one in any case."""
    others = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(cores)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@contextmanager
def no_wheel() -> Iterator[None]:
    """Run as if saccade-cpu were not installed, in this process, so that both sides take turns in one run."""
    # SACCADE_CPU=off is read once for a process.
    with patch.object(native, "is_on", bool), patch.object(native_statistics, "is_on", bool):
        yield


def lacking(dtype: torch.dtype = torch.float32) -> str:
    """Return the conditions of promised ratios that this machine lacks."""
    if not native.is_on():
        return "without saccade-cpu"
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "no AVX-512"
    if dtype is torch.bfloat16 and not torch.cpu._is_amx_tile_supported():
        return "no AMX"
    return ""
