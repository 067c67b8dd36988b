"""Table: a constant tensor of a mask, with a copy on each device that reads it."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.support.torch_modes import is_tracing


class Table:
    """A constant tensor of a mask.

    A compiler that traces ``allows`` into a kernel needs tensors that exist already: call `on` for the device before.

    Args:
        values: the tensor, on the CPU.
    """

    def __init__(self, values: Tensor):
        self._on = {"cpu": values}

    def on(self, device: torch.device) -> Tensor:
        """Return the tensor on a device."""
        name = device.type if device.index is None else f"{device.type}:{device.index}"
        copied = self._on.get(name)
        if copied is None:
            copied = self._on["cpu"].to(device)
            if type(copied) is Tensor and not is_tracing():
                self._on[name] = copied
        return copied
