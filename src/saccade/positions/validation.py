"""The checks of positions and distances."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.positions.token_positions import GivenPositions, Positions, can_be_read
from saccade.support.errors import describe, type_error, value_error

__all__ = [
    "as_positions",
    "check_below",
    "check_distances",
]


def check_distances(distances: Tensor) -> None:
    """Raise unless ``distances`` is int64 ``[distances]``."""
    if not isinstance(distances, Tensor) or distances.dtype != torch.int64:
        got = str(getattr(distances, "dtype", type(distances).__name__)).removeprefix("torch.")
        raise type_error("distances", "be an int64 tensor", got)
    if distances.dim() != 1:
        hint = "a distance is a query's position minus a key's: torch.arange(-3, 4)"
        raise value_error("distances", "have one axis", list(distances.shape), hint=hint)


def as_positions(positions: GivenPositions, device: torch.device | None = None) -> Tensor:
    """Positions as an int64 tensor; a range becomes ``[len]``, a tensor keeps its shape."""
    given = Positions.of(positions)
    if given.table is None:
        return given.on(device)[0]
    return given.table if device is None else given.table.to(device)


def check_below(positions: Tensor, limit: int, hint: str) -> None:
    """Raise where a position is ``limit`` or later, as far as that can be known without waiting."""
    if can_be_read(positions) and int(positions.max()) >= limit:
        facts = [describe("positions", positions)]
        raise value_error("positions", f"be below {limit}", "a larger one", facts=facts, hint=hint)
