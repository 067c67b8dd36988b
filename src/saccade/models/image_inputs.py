"""Checks of the images and feature maps that a model is called with, and position vectors of their cells."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.support.errors import describe, value_error
from saccade.support.validation import Shapes

__all__ = ["cells", "check_map", "waves"]


def check_map(where: str, name: str, given: Tensor, channels: int, weight: Tensor | None) -> None:
    """Raise unless an image or feature map is ``[batch, channels, H, W]``, not empty, and in the dtype of a weight."""
    hint = f"{name}[None] adds the batch" if isinstance(given, Tensor) and given.dim() == 3 else None
    sizes = Shapes(f"{name} [batch, channels, H, W]").check(where, given, hint=hint, channels=channels)
    if not sizes["H"] * sizes["W"]:
        raise value_error(where, name, "have at least one row and column", list(given.shape))
    if weight is not None and given.dtype != weight.dtype and not torch.is_autocast_enabled(given.device.type):
        rule = f"be {str(weight.dtype).removeprefix('torch.')}, like the parameters"
        got = str(given.dtype).removeprefix("torch.")
        raise value_error(where, name, rule, got, facts=[describe(name, given)])


def cells(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the row and column of each cell of a grid, row by row: float64 ``[height * width]`` each."""
    sides = (torch.arange(side, dtype=torch.float64, device=device) for side in (height, width))
    y, x = torch.meshgrid(*sides, indexing="ij")
    return y.flatten(), x.flatten()


def waves(y: Tensor, x: Tensor, embed_dim: int, base: float = 10000.0) -> Tensor:
    """Return a vector of sinusoids for each cell of an image: half of it encodes the row, half the column.

    Each half is the vector of `saccade.positions.Sinusoidal`, at a position that may be fractional.

    Args:
        y, x: rows and columns, float64 of any shape.
        embed_dim: a multiple of 4.
        base: base of the wavelengths.

    Returns:
        float64 ``[..., embed_dim]``.
    """
    count = embed_dim // 4
    frequencies = base ** -(torch.arange(count, dtype=torch.float64, device=y.device) / count)
    angles = torch.stack([y, x], -1)[..., None] * frequencies  # [..., 2, count]
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-3)
