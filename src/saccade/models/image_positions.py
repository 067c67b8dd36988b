"""Position vectors for image cells: sinusoids of their rows and columns."""

from __future__ import annotations

import torch
from torch import Tensor


def cell_indices(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the row and the column of each image cell, row by row, float64 ``[height * width]`` each."""
    sides = (torch.arange(side, dtype=torch.float64, device=device) for side in (height, width))
    y, x = torch.meshgrid(*sides, indexing="ij")
    return y.flatten(), x.flatten()


def sinusoids(y: Tensor, x: Tensor, embed_dim: int, base: float = 10000.0) -> Tensor:
    """Return a sinusoidal position vector for each image cell: one half encodes the row, and the other the column.

    Each half is a vector as in `saccade.positions.Sinusoidal`. Positions may be fractional.

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
