"""What numbers are: NaN and infinity, looked for, and the dtype that they are computed in."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["is_finite", "not_finite", "wide_dtype", "widest_dtype"]

_WITHOUT_FLOAT64 = frozenset(["mps"])  # Apple's GPUs


def is_finite(*tensors: Tensor) -> bool:
    """True if no element is NaN or inf. A sum that overflows counts as not finite: slower, never wrong."""
    if len(tensors) > 1 and not tensors[0].is_cpu:  # to wait for a device once is dear enough
        totals = torch.stack([_sum(x).to(torch.float32) for x in tensors])
        return math.isfinite(totals.sum().item())
    return all(math.isfinite(_sum(x).item()) for x in tensors)


def _sum(x: Tensor) -> Tensor:
    tensor = x.detach() if x.requires_grad else x
    if not tensor.is_contiguous() and tensor.dim() > 1 and tensor.dtype in (torch.float32, torch.float64):
        tensor = tensor.sum(tuple(range(tensor.dim() - 1)))  # where heads are views, a seventh of the time
    return tensor.sum(dtype=torch.float32) if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.sum()


def not_finite(x: Tensor) -> Tensor:
    """Which rows of ``x [..., rows, width]`` hold NaN or inf, bool ``[..., rows]``."""
    return ~torch.isfinite(x.detach()).all(-1)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of another are computed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widest_dtype(device: torch.device) -> torch.dtype:
    """The widest dtype of a device, for what must lose nothing: float64, or float32 where there is no other."""
    return torch.float32 if device.type in _WITHOUT_FLOAT64 else torch.float64
