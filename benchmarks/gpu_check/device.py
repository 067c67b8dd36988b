"""The device under check: everything that only CUDA can do; a rehearsal replaces it by a processor."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_check import rehearsal

__all__ = ["Cuda", "Device", "Processor", "device_named"]

Call = Callable[[], Any]
_SMI = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"


class Device:
    """A device, as the steps use it.

    Attributes:
        name: as torch calls it.
        compiler: torch.compile's backend.
    """

    name: str
    compiler: str

    def facts(self) -> dict[str, Any]:
        """Return name, memory and clocks of the card."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Prepare this process, before the first step."""

    def synchronize(self) -> None:
        """Wait until everything has run; raises if the device has failed."""

    def seconds(self, call: Call) -> float:
        """Return how long one call takes."""
        raise NotImplementedError

    def peak_bytes(self, call: Call) -> int:
        """Return how much memory a call adds at its peak."""
        raise NotImplementedError

    def kernels(self, call: Call) -> list[str]:
        """Return the names of the kernels that a call runs, those that take longest first."""
        raise NotImplementedError

    def poison(self) -> None:
        """Fill free memory with NaN, so that a result nobody wrote is noticed."""

    def cudnn(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Run torch's attention by cuDNN alone."""
        raise NotImplementedError

    def varlen(self, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int) -> Tensor:
        """Run torch's varlen_attn, causal, on ``[tokens, heads, width]``."""
        raise NotImplementedError


class Cuda(Device):
    """The first CUDA device."""

    name = "cuda"
    compiler = "inductor"

    def facts(self) -> dict[str, Any]:
        about = torch.cuda.get_device_properties(0)
        facts = {
            "card": about.name,
            "capability": f"{about.major}.{about.minor}",
            "memory_bytes": about.total_memory,
            "processors": about.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
        return facts | _smi()

    def prepare(self) -> None:
        torch.cuda.init()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, call: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    def peak_bytes(self, call: Call) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before

    def kernels(self, call: Call) -> list[str]:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
        events = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)
        return [event.key for event in events if event.self_device_time_total > 0]

    def poison(self) -> None:
        torch.cuda.empty_cache()
        sizes = [1 << 17, 1 << 20, 1 << 24] * 8  # of the pools for small and for large tensors
        held = [torch.full((elements,), torch.nan, device="cuda") for elements in sizes]
        del held

    def cudnn(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(query, key, value, mask)

    def varlen(self, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415  of later versions of torch

        return varlen_attn(query, key, value, ends, ends, longest, longest, window_size=(-1, 0))


class Processor(Device):
    """A processor in the place of a GPU, to rehearse the check: sizes are small, and its figures mean nothing."""

    name = "cpu"
    compiler = "eager"

    def facts(self) -> dict[str, Any]:
        return {"card": "none: a rehearsal on a processor"} | _smi()

    def prepare(self) -> None:
        rehearsal.pretend()

    def seconds(self, call: Call) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def peak_bytes(self, call: Call) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            call()
        return sum(max(0, event.self_cpu_memory_usage) for event in seen.events())  # all of it, not its peak

    def kernels(self, call: Call) -> list[str]:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            call()
        events = sorted(seen.key_averages(), key=lambda event: -event.self_cpu_time_total)
        return [event.key for event in events if event.key.startswith("aten::")]

    def cudnn(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return rehearsal.faulty_cudnn(query, key, value, mask)

    def varlen(self, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int) -> Tensor:
        return rehearsal.faulty_varlen(query, key, value, ends, longest)


def device_named(name: str) -> Device:
    """Return the device with a name, "cuda" or "cpu"."""
    return Cuda() if name == "cuda" else Processor()


def _smi() -> dict[str, str]:
    """Return what nvidia-smi says of the card; empty where there is no such program."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, "--id=0", f"--query-gpu={_SMI}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    values = [value.strip() for value in done.stdout.split(",")]
    names = [name.replace(".", "_") for name in _SMI.split(",")]
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else {}
