"""What is refused here, in sentences: sizes, factors, positions, distances."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.arguments import is_finite_number, is_integer
from saccade.errors import describe, type_error, value_error
from saccade.transforms import is_mapped

__all__ = [
    "as_positions",
    "check_below",
    "check_count",
    "check_distances",
    "check_flag",
    "check_number",
    "contents_are_free",
]


def check_count(where: str, name: str, value: object, least: int = 1) -> None:
    """Raise unless ``value`` is an int of at least ``least``."""
    if not is_integer(value) or value < least:
        raise value_error(where, name, f"be an int of at least {least}", repr(value))


def check_number(
    where: str, name: str, value: object, *, least: float | None = None, above: float | None = None
) -> None:
    """Raise unless ``value`` is a finite number, at least ``least`` or larger than ``above``."""
    number = is_finite_number(value)
    if least is not None and not (number and value >= least):  # type: ignore[operator]
        raise value_error(where, name, f"be a finite number of at least {least:g}", repr(value))
    if above is not None and not (number and value > above):  # type: ignore[operator]
        raise value_error(where, name, f"be a finite number above {above:g}", repr(value))


def check_flag(where: str, name: str, value: object) -> None:
    """Raise unless ``value`` is True or False; the string "no" is true, and nobody means it."""
    if not isinstance(value, bool):
        raise type_error(where, name, "be True or False", repr(value))


def check_distances(where: str, distances: object) -> None:
    """Raise unless ``distances`` is int64 ``[distances]``."""
    if not isinstance(distances, Tensor) or distances.dtype != torch.int64:
        got = str(getattr(distances, "dtype", type(distances).__name__)).removeprefix("torch.")
        raise type_error(where, "distances", "be an int64 tensor", got)
    if distances.dim() != 1:
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
    if not isinstance(positions, Tensor) or positions.dtype != torch.int64:
        got = str(getattr(positions, "dtype", type(positions).__name__)).removeprefix("torch.")
        raise type_error(where, "positions", "be a range or an int64 tensor", got)
    if contents_are_free(positions) and int(positions.min()) < -1:
        hint = "-1 means that no token stands here"
        facts = [describe("positions", positions)]
        raise value_error(where, "positions", "be at least -1", "a smaller one", facts=facts, hint=hint)
    return positions if device is None else positions.to(device)


def check_below(where: str, positions: Tensor, limit: int, hint: str) -> None:
    """Raise where a position is ``limit`` or later, as far as that can be known without waiting."""
    if contents_are_free(positions) and int(positions.max()) >= limit:
        facts = [describe("positions", positions)]
        raise value_error(where, "positions", f"be below {limit}", "a larger one", facts=facts, hint=hint)


def contents_are_free(x: Tensor) -> bool:
    """Whether x has elements that can be read: without waiting for a device, outside of a compiler and of ``vmap``."""
    return x.device.type == "cpu" and x.numel() > 0 and not torch.compiler.is_compiling() and not is_mapped(x)
