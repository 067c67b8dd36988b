"""A table that a mask reads: made once, and once more for each device that it is read on."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.support.torch_modes import is_tracing

__all__ = ["Table"]


class Table:
    """A constant tensor of a mask.

    A compiler that traces ``allows`` into a kernel takes tensors that exist, and none that are made on the way: `on` is
    to have been called for that device before.

    Args:
        values: on the CPU.
    """

    def __init__(self, values: Tensor):
        self._on = {"cpu": values}

    def on(self, device: torch.device) -> Tensor:
        """The table where it is to be read."""
        name = device.type if device.index is None else f"{device.type}:{device.index}"
        found = self._on.get(name)
        if found is None:
            found = self._on["cpu"].to(device)
            if type(found) is Tensor and not is_tracing():
                self._on[name] = found
        return found
