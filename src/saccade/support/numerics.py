"""Detect NaN and infinity, and choose the dtypes of computations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from saccade.support.torch_modes import has_values

_WITHOUT_FLOAT64 = frozenset(["mps"])  # Apple's GPUs


def is_finite(*tensors: Tensor) -> bool:
    """Return whether all elements of the tensors are finite, that is, neither NaN nor inf.

    If the sum of finite elements overflows, the result is False, which is slower for callers but safe. Tensors without
    values count as finite.
    """
    if len(tensors) > 1 and not tensors[0].is_cpu:  # wait for the device only once
        totals = torch.stack([_sum_of_entries(x).to(torch.float32) for x in tensors])
        return not has_values(totals) or math.isfinite(totals.sum().item())
    for x in tensors:
        total = _sum_of_entries(x)
        if has_values(total) and not math.isfinite(total.item()):
            return False
    return True


def _sum_of_entries(x: Tensor) -> Tensor:
    """Sum all elements of a tensor to detect NaN and inf, in float32 for half precision."""
    tensor = x.detach() if x.requires_grad else x
    return tensor.sum(dtype=torch.float32) if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.sum()


def not_finite(x: Tensor) -> Tensor:
    """Return which rows of ``x [..., rows, width]`` contain NaN or inf, bool ``[..., rows]``."""
    return ~torch.isfinite(x.detach()).all(-1)


def any_true(marks: Tensor) -> bool:
    """Return whether a bool tensor has a True value. A tensor without values counts as all False."""
    return has_values(marks) and bool(marks.any())


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of computations with tensors of ``dtype``: float64 for float64, and float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widest_dtype(device: torch.device) -> torch.dtype:
    """Return the widest float dtype of a device: float64 if the device supports it, and float32 if not."""
    return torch.float32 if device.type in _WITHOUT_FLOAT64 else torch.float64
