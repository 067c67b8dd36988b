"""Compiled attention for CPUs: what `impl="native"` of saccade runs. It has no functions for users of its own."""

from pathlib import Path

import torch

__all__ = ["abilities"]

torch.ops.load_library(Path(__file__).with_name("saccade_cpu.so"))


def abilities() -> int:
    """What this processor lets the code use: 0 plain, 1 AVX2, 2 AVX-512, 3 AVX-512 with bfloat16, 4 AMX."""
    return int(torch.ops.saccade_cpu.abilities())
