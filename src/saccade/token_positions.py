"""Where tokens stand: positions as arguments, and a mask read at them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from saccade.errors import describe, type_error, value_error
from saccade.masks import Mask

__all__ = ["AtPositions", "Positions", "check_positions", "consecutive", "first_position"]

Positions = None | range | Tensor
"""None (default), a range, or int64 ``[len]`` or ``[batch, len]``; -1 means that no token stands here."""


def check_positions(positions: Positions, name: str, batch: int, length: int, where: str) -> None:
    """Raise unless ``positions`` gives one position, or -1, to each of ``length`` tokens."""
    if positions is None:
        return
    if isinstance(positions, range):
        if len(positions) != length:
            raise value_error(where, name, f"hold {length} positions", len(positions))
        if length and min(positions[0], positions[-1]) < 0:  # not min(positions), which walks through it
            raise value_error(where, name, "start at 0 or later", positions)
        return
    if not isinstance(positions, Tensor) or positions.dtype != torch.int64:
        got = str(getattr(positions, "dtype", type(positions).__name__)).removeprefix("torch.")
        raise type_error(where, name, "be a range, an int64 tensor or None", got)
    if positions.shape not in ((length,), (1, length), (batch, length)):
        rule = f"have shape [{length}] or [{batch}, {length}]"
        raise value_error(where, name, rule, list(positions.shape))
    # Reading the contents would wait for any other device; there, all negative positions mean "no token".
    can_be_read = positions.device.type == "cpu" and positions.numel() and not torch.compiler.is_compiling()
    if can_be_read and int(positions.min()) < -1:
        hint = "-1 means that no token stands here"
        raise value_error(where, name, "be at least -1", "a smaller one", facts=[describe(name, positions)], hint=hint)


def first_position(positions: Positions, default: int) -> int | None:
    """The position of the first token if the others follow one by one, else None."""
    if positions is None:
        return default
    if isinstance(positions, range) and (positions.step == 1 or len(positions) <= 1):
        return positions.start
    return None


def consecutive(start: int, stop: int) -> range | Tensor:
    """Positions one by one; a tensor where this is traced, as a range would fix the length."""
    return torch.arange(start, stop) if torch.compiler.is_compiling() else range(start, stop)


@dataclasses.dataclass(frozen=True, eq=False)
class AtPositions(Mask):
    """A mask on *indices*, made from a mask on positions and the positions of the tokens.

    Args:
        mask: the rule on positions.
        q_positions, kv_positions: int64 ``[batch | 1, len]``; below 0: no token stands here, it sees nothing and
            nothing sees it.
    """

    mask: Mask
    q_positions: Tensor
    kv_positions: Tensor

    @classmethod
    def of(
        cls,
        mask: Mask,
        q_positions: Positions,
        kv_positions: Positions,
        q_len: int,
        kv_len: int,
        device: torch.device,
    ) -> AtPositions:
        """Write positions out as tensors; a default (None) counts from 0."""
        q, kv = (
            torch.atleast_2d(torch.arange(length, device=device) if x is None else _written_out(x, device))
            for x, length in ((q_positions, q_len), (kv_positions, kv_len))
        )
        return cls(mask, q, kv)

    @property
    def shape(self) -> tuple[int, int]:
        return (max(self.mask.shape[0], len(self.q_positions), len(self.kv_positions)), self.mask.shape[1])

    @property
    def is_value(self) -> bool:
        return False

    @property
    def asks_functions(self) -> bool:
        return self.mask.asks_functions

    def __repr__(self) -> str:
        return f"{self.mask} at given positions"

    def positions(self, b: Tensor, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Positions of the tokens with these indices."""
        return tuple(  # type: ignore[return-value]
            table[b if len(table) > 1 else torch.zeros_like(b), index]
            for table, index in ((self.q_positions, q), (self.kv_positions, kv))
        )

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        q_position, kv_position = self.positions(b, q, kv)
        here = (q_position >= 0) & (kv_position >= 0)
        return here & self.mask.allows(b, h, q_position, kv_position)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.q_positions, self.kv_positions, *self.mask.tensors())


def _written_out(positions: range | Tensor, device: torch.device) -> Tensor:
    if isinstance(positions, range):
        return torch.arange(positions.start, positions.stop, positions.step, device=device)
    return positions.to(device)
