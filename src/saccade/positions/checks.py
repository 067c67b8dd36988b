"""The checks of positions and distances."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.errors import describe, type_error, value_error
from saccade.transforms import is_mapped

__all__ = [
    "as_positions",
    "check_below",
    "check_distances",
    "contents_are_free",
]


def check_distances(where: str, distances: Tensor) -> None:
    """Raise unless ``distances`` is int64 ``[distances]``."""
    if _int64(where, "distances", distances, "be an int64 tensor").dim() != 1:
        hint = "a distance is a query's position minus a key's: torch.arange(-3, 4)"
        raise value_error(where, "distances", "have one axis", list(distances.shape), hint=hint)


def as_positions(where: str, positions: object, device: torch.device | None = None) -> Tensor:
    """``positions``, a range or an int64 tensor of any shape, as a tensor; refuses anything below -1.

    Where reading contents would wait for a device, or stop a compiler, all negative positions mean "no token".
    """
    if isinstance(positions, range):
        if positions and min(positions[0], positions[-1]) < 0:  # not min(positions), which walks through it
            raise value_error(where, "positions", "start at 0 or later", positions)
        return torch.arange(positions.start, positions.stop, positions.step, device=device)
    positions = _int64(where, "positions", positions, "be a range or an int64 tensor")
    if contents_are_free(positions) and int(positions.min()) < -1:
        hint = "-1 means that no token stands here"
        facts = [describe("positions", positions)]
        raise value_error(where, "positions", "be at least -1", "a smaller one", facts=facts, hint=hint)
    return positions if device is None else positions.to(device)


def _int64(where: str, name: str, x: object, rule: str) -> Tensor:
    if not isinstance(x, Tensor) or x.dtype != torch.int64:
        raise type_error(where, name, rule, str(getattr(x, "dtype", type(x).__name__)).removeprefix("torch."))
    return x


def check_below(where: str, positions: Tensor, limit: int, hint: str) -> None:
    """Raise where a position is ``limit`` or later, as far as that can be known without waiting."""
    if contents_are_free(positions) and int(positions.max()) >= limit:
        facts = [describe("positions", positions)]
        raise value_error(where, "positions", f"be below {limit}", "a larger one", facts=facts, hint=hint)


def contents_are_free(x: Tensor) -> bool:
    """Whether x has elements that can be read: without waiting for a device, outside of a compiler and of ``vmap``."""
    return x.device.type == "cpu" and x.numel() > 0 and not torch.compiler.is_compiling() and not is_mapped(x)
