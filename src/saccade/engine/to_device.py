"""Copy objects that contain tensors, such as masks, to a different device or dtype."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from saccade.support.errors import kind, type_error
from saccade.support.numerics import wide_dtype

T = TypeVar("T")


def target_of(target: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[torch.device | None, torch.dtype | None]:
    """Return the device and dtype passed to ``A.to(...)``, or None for whichever was not passed."""
    device, dtype = None, None
    for name in named:
        if name not in ("device", "dtype"):
            raise type_error("an argument", "be device= or dtype=", f"{name}=")
    for part in (*target, *(x for x in named.values() if x is not None)):
        if isinstance(part, torch.dtype) and part.is_floating_point:
            dtype = part
        elif isinstance(part, str | torch.device):
            device = torch.device(part)
        else:
            got = str(part) if isinstance(part, torch.dtype) else kind(part)
            raise type_error("the target of Matrix.to", "be a device, a float dtype, or both", got)
    return device, dtype


def moved(x: T, device: torch.device | None, dtype: torch.dtype | None) -> T:
    """Copy an object and all tensors in it to a device or dtype.

    With a dtype, floating-point tensors become float64 if it is float64, and float32 otherwise.

    Args:
        x: a tensor, an object of saccade, or a tuple, list or dict of these. Anything else is returned unchanged.
        device, dtype: the target; None leaves device or dtype unchanged.
    """
    if isinstance(x, Tensor):
        wide = wide_dtype(dtype) if dtype is not None and x.is_floating_point() else None
        return x.to(device, wide)  # type: ignore[return-value]  # a tensor again
    if isinstance(x, torch.dtype | torch.device):
        target = dtype if isinstance(x, torch.dtype) else device
        return x if target is None else target  # type: ignore[return-value]  # of the same kind
    if isinstance(x, tuple | list):
        items = [moved(each, device, dtype) for each in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    if isinstance(x, dict):
        return type(x)((name, moved(each, device, dtype)) for name, each in x.items())
    if isinstance(x, nn.Module | type) or not type(x).__module__.startswith("saccade.") or not hasattr(x, "__dict__"):
        return x
    copied = copy.copy(x)
    copied.__dict__.update({name: moved(each, device, dtype) for name, each in x.__dict__.items()})
    return copied
