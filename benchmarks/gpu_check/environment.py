"""The environment: versions, the card and its clocks, compilers, and whether everything can be imported."""

from __future__ import annotations

import importlib
import os
import shutil
import time
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_check.finding import Finding
from benchmarks.gpu_check.steps import Context

__all__ = ["measure"]

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "pytest",
    "hypothesis",
    "safetensors",
    "rich",
    "typer",
    "saccade",
)
_NEEDED = ("torch", "transformers", "numpy", "saccade", "pytest", "hypothesis")
_COMPILERS = ("g++", "gcc", "nvcc", "ptxas")
_SIDE = {"cuda": 8192, "cpu": 512, "quick": 128}


def measure(context: Context) -> Iterator[Finding]:
    """Yield what is here, the card first."""
    facts = context.device.facts()
    yield Finding("card", "; ".join(f"{name} {value}" for name, value in facts.items()), True, facts, headline=True)
    found = {name: shutil.which(name) for name in _COMPILERS}
    text = ", ".join(f"{name}: {path or 'none'}" for name, path in found.items())
    yield Finding("compilers", f"{text}; {os.cpu_count()} cores", None, headline=True)
    yield _dense_rate(context)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        yield _backend(context, backend)
    yield _flash_backend_of_flex()
    for name in _PACKAGES:
        yield _imported(name)
    yield _compiles(context)


def _imported(name: str) -> Finding:
    start = time.perf_counter()
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a package that cannot be imported is a result, whatever it raises
        return Finding(name, f"cannot be imported: {type(error).__name__}: {error}", False if name in _NEEDED else None)
    text = f"{getattr(module, '__version__', 'no version')}, imported in {time.perf_counter() - start:.1f} s"
    return Finding(name, text, True, {"version": getattr(module, "__version__", "")}, headline=name in _NEEDED[:2])


def _flash_backend_of_flex() -> Finding:
    try:
        importlib.import_module("flash_attn.cute")
    except ImportError as error:
        return Finding("Flex with its FLASH backend", f"not here: {error}")
    return Finding("Flex with its FLASH backend", "here", True)


def _backend(context: Context, backend: SDPBackend) -> Finding:
    query = torch.randn(1, 2, 64, 64, device=context.device.name, dtype=torch.bfloat16)
    name = f"SDPA by {backend.name}"
    try:
        with sdpa_kernel(backend):
            scaled_dot_product_attention(query, query, query, is_causal=True)
    except RuntimeError as error:
        return Finding(name, f"does not run here: {' '.join(str(error).split())[:100]}")
    return Finding(name, "runs", True)


def _compiles(context: Context) -> Finding:
    """Judge whether torch.compile works here: Triton needs a C compiler as well as a card."""
    if context.left() < 0.0:
        return Finding("torch.compile", "not tried: no time was left")
    x = torch.randn(1000, device=context.device.name)
    start = time.perf_counter()
    try:
        compiled = torch.compile(lambda x: x.sin() + 1.0, backend=context.device.compiler)
        torch.testing.assert_close(compiled(x), x.sin() + 1.0)
    except Exception as error:  # compilers raise whatever they like
        return Finding("torch.compile", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", False)
    return Finding("torch.compile", f"works, {time.perf_counter() - start:.1f} s", True, headline=True)


def _dense_rate(context: Context) -> Finding:
    """Return the rate of a dense product in bfloat16, which attention is measured by."""
    side = _SIDE[context.level]
    a, b = (torch.randn(side, side, device=context.device.name, dtype=torch.bfloat16) for _ in range(2))
    seconds = min(context.device.seconds(lambda: a @ b) for _ in range(10))
    rate = 2 * side**3 / seconds
    return Finding("dense product, bfloat16", f"{rate / 1e12:.3g} TFLOP/s", None, {"flops": rate}, headline=True)
