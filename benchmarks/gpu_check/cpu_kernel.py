"""The compiled CPU kernel on this machine's cores: built here, or taken from a wheel, and timed beside SDPA."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import statistics
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import saccade as sc
from benchmarks.checking import assert_rows_by_definition
from benchmarks.gpu_check.finding import Finding
from benchmarks.gpu_check.steps import ROOT, Context
from benchmarks.measuring import seconds
from saccade import masks
from saccade.engine.kernels import native

__all__ = ["measure"]

_THREADS = (1, 2, 4, 8, 16)
_LENGTHS = {
    "cuda": {"window": 8192, "full": 4096},
    "cpu": {"window": 4096, "full": 1024},
    "quick": {"window": 512, "full": 256},
}
_HEADS, _WIDTH, _SIDE = 8, 64, 256
_SECONDS = {"cuda": 1.0, "cpu": 0.3, "quick": 0.0}  # to spend on each side
_WHEELS = ROOT / ".whl"


def measure(context: Context) -> Iterator[Finding]:
    """Yield how the kernel was had, then its times."""
    with tempfile.TemporaryDirectory() as folder:
        origin = _installed(context, Path(folder))
        native.abilities.cache_clear()
        native.is_on.cache_clear()
        able = native.abilities()
        if able is None:
            yield Finding("saccade-cpu", origin, None if "there is no C++ compiler" in origin else False, headline=True)
            return
        yield Finding(
            "saccade-cpu", f"{origin}; instructions at level {able} of 4", True, {"abilities": able}, headline=True
        )
        counts = [count for count in _THREADS if count <= len(os.sched_getaffinity(0))]
        dtypes = [torch.float32, *([torch.bfloat16] if native.reads(torch.bfloat16) else [])]
        for dtype in dtypes:
            for name in ("window", "full"):
                yield from _case(context, name, dtype, counts)


def _installed(context: Context, folder: Path) -> str:
    """Make saccade_cpu importable, and return how: installed, else compiled here, else from a wheel."""
    start = time.perf_counter()
    if importlib.util.find_spec("saccade_cpu"):
        return "installed"
    if shutil.which(os.environ.get("CXX", "g++")):
        try:
            _built(folder)
        except (Exception, SystemExit) as error:  # a compiler that is too old: a wheel may do
            why = f"the compiler failed: {' '.join(str(error).split())[:150]}"
        else:
            sys.path.insert(0, str(folder))
            return f"compiled here in {time.perf_counter() - start:.0f} s"
    else:
        why = "there is no C++ compiler"
    wheels = [context.wheel] if context.wheel else sorted(_WHEELS.glob("saccade_cpu-*.whl"))
    if not wheels:
        make = f"pip wheel ./native --no-deps --no-build-isolation -w {_WHEELS.name}"
        return f"not measured: {why}, and no wheel was carried; `{make}` makes one elsewhere, and --wheel passes it"
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder)
    sys.path.insert(0, str(folder))
    return f"from {wheels[0].name}, since {why}"


def _built(folder: Path) -> None:
    """Compile native/ into a folder."""
    place = ROOT / "native" / "setup.py"
    found = importlib.util.spec_from_file_location("setup_of_saccade_cpu", place)
    assert found is not None
    assert found.loader is not None
    setup = importlib.util.module_from_spec(found)
    found.loader.exec_module(setup)
    setup.build(folder / "saccade_cpu")
    shutil.copy(ROOT / "native" / "saccade_cpu" / "__init__.py", folder / "saccade_cpu")


def _case(context: Context, name: str, dtype: torch.dtype, counts: list[int]) -> Iterator[Finding]:
    """Yield times of a mask with each number of threads."""
    length = _LENGTHS[context.level][name]
    drawn = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, _HEADS, length, _WIDTH, generator=drawn).to(dtype) for _ in range(3)]
    mask = masks.Window(_SIDE, _SIDE) if name == "window" else masks.Full()
    seen = mask.to_dense(length) if name == "window" else None
    title = f"{name} {length:,}, {str(dtype).removeprefix('torch.')}"
    try:
        assert_rows_by_definition(sc.attention(*tensors, mask, impl="native"), tensors, mask)
    except AssertionError as error:
        yield Finding(title, f"wrong: {' '.join(str(error).split())[:200]}", False, headline=True)
        return
    before, alone = torch.get_num_threads(), 0.0
    for count in counts:
        if context.left() < 0.0:
            break
        torch.set_num_threads(count)
        ours = _median(context, lambda: sc.attention(*tensors, mask, impl="native"))
        theirs = _median(context, lambda: F.scaled_dot_product_attention(*tensors, attn_mask=seen))
        alone = alone or ours
        text = f"{1e3 * ours:.3g} ms, {theirs / ours:.2f}x SDPA, {alone / ours:.1f}x one thread"
        figures = {"seconds": ours, "ratio to SDPA": theirs / ours, "speed-up": alone / ours, "threads": count}
        yield Finding(f"{title}, {count} threads", text, None, figures, headline=True)
    torch.set_num_threads(before)


def _median(context: Context, call: Callable[[], Tensor]) -> float:
    """Return seconds of a call: the median of as many as fit into the time, five at most."""
    with torch.no_grad():
        times = [seconds(call)]
        while len(times) < 5 and sum(times) < _SECONDS[context.level]:
            times.append(seconds(call))
    return statistics.median(times)
