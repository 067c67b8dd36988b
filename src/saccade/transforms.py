"""Whether autocast, a compiler or a transform of ``torch.func`` is at work, for which tensors stand for others."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = [
    "any_autocast",
    "has_forward_derivatives",
    "is_autocast",
    "is_mapped",
    "is_plain",
    "is_transformed",
    "without_autocast",
]

any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
"""Whether autocast may be switched on anywhere; mostly it is not, and this is told fastest."""
_any_transform = getattr(torch._C, "_are_functorch_transforms_active", lambda: False)


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is switched on where a tensor is."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast switched off on a device, where it may be on; torch knows none for tensors without memory."""
    return torch.autocast(device.type, enabled=False) if any_autocast() and device.type != "meta" else nullcontext()


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` is at work, which has to see one function and not what is in it."""
    return bool(_any_transform())


def is_mapped(x: Tensor) -> bool:
    """Whether ``vmap`` is at work on a tensor, so that what it holds cannot be read."""
    functorch = getattr(torch._C, "_functorch", None)
    while functorch is not None and is_transformed() and functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def has_forward_derivatives() -> bool:
    """Whether derivatives are taken forwards (``jvp``, ``jacfwd``), for which each operation needs its own rule."""
    return torch.autograd.forward_ad._current_level >= 0 and not torch.compiler.is_compiling()


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is what it seems: memory of its own, which may be written to and kept for the next call."""
    return type(x) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling() and not is_transformed()
