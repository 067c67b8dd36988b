"""Pictures and feature maps that a model is called with: their check, and where their cells stand."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.support.errors import describe, value_error
from saccade.support.validation import ShapeSpec

__all__ = ["cells", "check_map", "waves"]


def check_map(name: str, given: Tensor, channels: int, weight: Tensor | None) -> None:
    """Raise unless a picture or feature map is ``[batch, channels, H, W]``, not empty, and in the dtype of a weight."""
    hint = f"{name}[None] adds the batch" if isinstance(given, Tensor) and given.dim() == 3 else None
    sizes = ShapeSpec(f"{name} [batch, channels, H, W]").check(given, hint=hint, channels=channels)
    if not sizes["H"] * sizes["W"]:
        raise value_error(name, "have at least one row and column", list(given.shape))
    if weight is not None and given.dtype != weight.dtype and not torch.is_autocast_enabled(given.device.type):
        rule = f"be {str(weight.dtype).removeprefix('torch.')}, like the parameters"
        got = str(given.dtype).removeprefix("torch.")
        raise value_error(name, rule, got, facts=[describe(name, given)])


def cells(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of each cell of a grid, row by row: float64 ``[height * width]`` each."""
    sides = (torch.arange(side, dtype=torch.float64, device=device) for side in (height, width))
    y, x = torch.meshgrid(*sides, indexing="ij")
    return y.flatten(), x.flatten()


def waves(y: Tensor, x: Tensor, embed_dim: int, base: float = 10000.0) -> Tensor:
    """A vector for each place in a picture: half of it tells the row, half the column.

    Each half is what `saccade.positions.Sinusoidal` says of a position, which need not be whole here.

    Args:
        y, x: rows and columns, float64 of any shape.
        embed_dim: a multiple of 4.
        base: of the wavelengths.

    Returns:
        float64 ``[..., embed_dim]``.
    """
    count = embed_dim // 4
    frequencies = base ** -(torch.arange(count, dtype=torch.float64, device=y.device) / count)
    angles = torch.stack([y, x], -1)[..., None] * frequencies  # [..., 2, count]
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-3)
