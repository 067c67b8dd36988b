"""Compiled attention for CPUs, which `impl="native"` of saccade runs. It has no functions for users."""

from pathlib import Path

import torch

__all__ = ["abilities"]

torch.ops.load_library(Path(__file__).with_name("saccade_cpu.so"))


def abilities() -> int:
    """Return the level in use.

    On x86-64: 0 plain, 1 AVX2, 2 AVX-512, 3 AVX-512 with bfloat16, 4 AMX. On ARM: 0 NEON, 1 NEON with bfloat16.
    """
    return int(torch.ops.saccade_cpu.abilities())
