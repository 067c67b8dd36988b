"""Compiled attention for CPUs, which `impl="native"` of saccade runs. It has no functions for users."""

import sys
from pathlib import Path

import torch

__all__ = ["abilities"]

if not hasattr(torch.ops.saccade_cpu, "abilities"):  # a process loads one library, from the wheel or the kernel hub
    torch.ops.load_library(Path(__file__).with_name("saccade_cpu.so"))
sys.modules.setdefault("saccade_cpu", sys.modules[__name__])  # the kernel hub imports this file under another name


def abilities() -> int:
    """Return the level in use.

    On x86-64: 0 plain, 1 AVX2, 2 AVX-512, 3 AVX-512 with bfloat16, 4 AMX. On ARM: 0 NEON, 1 NEON with bfloat16.
    """
    return int(torch.ops.saccade_cpu.abilities())
