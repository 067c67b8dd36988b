"""Whether a compiler or a transform of ``torch.func`` is at work, for which tensors stand for others."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["is_plain", "is_transformed"]


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` is at work, which has to see one function and not what is in it."""
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return active is not None and bool(active())


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is what it seems: memory of its own, which may be written to and kept for the next call."""
    return type(x) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling() and not is_transformed()
