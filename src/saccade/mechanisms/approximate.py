"""Approximate: a mechanism other than softmax, which is handed queries, keys and a mask that were checked."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.at_positions import GivenPositions, Positions, check_domain, check_positions, first_position
from saccade.engine.checks import autocast, check_query_key
from saccade.errors import unsupported
from saccade.masks import And, Mask, as_mask
from saccade.matrix import Matrix
from saccade.mechanisms.base import Mechanism

__all__ = ["Approximate", "Inputs", "parts_of", "scale_of"]


class Inputs(NamedTuple):
    """Queries and keys that fit together, and the mask for them.

    Attributes:
        query: ``[batch, heads, q_len, head_dim]``.
        key: ``[batch, kv_heads, kv_len, head_dim]``, in the dtype of the query, which is that of products.
        rule: the mask.
        shape: (batch, heads, q_len, kv_len).
        q_positions, kv_positions: where the tokens stand; None, a range or a tensor.
    """

    query: Tensor
    key: Tensor
    rule: Mask
    shape: tuple[int, int, int, int]
    q_positions: Positions
    kv_positions: Positions

    @property
    def wide(self) -> torch.dtype:
        """What is computed in: float64 for float64 inputs, else float32."""
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32

    @property
    def is_placed(self) -> bool:
        """Whether somebody said where the tokens stand: then a position below 0 means that none does."""
        return self.q_positions is not None or self.kv_positions is not None

    @property
    def starts(self) -> tuple[int | None, int | None]:
        """Where the first query and key stand, if the others follow them one by one; None for those that do not."""
        if not self.is_placed:
            return self.shape[3] - self.shape[2], 0
        return first_position(self.q_positions, 0), first_position(self.kv_positions, 0)

    def written_out(self) -> tuple[Tensor, Tensor]:
        """Positions of queries and keys as int64 ``[batch | 1, len]``."""
        device, (q_start, kv_start) = self.query.device, self.starts
        q = _table(self.q_positions, q_start, self.shape[2], device)
        return q, _table(self.kv_positions, kv_start, self.shape[3], device)


class Approximate(Mechanism):
    """A mechanism that makes its matrix of checked inputs."""

    @abstractmethod
    def made(self, given: Inputs) -> Matrix:
        """The matrix."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: object = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> Matrix:
        where = type(self).__name__
        query, key = autocast(query), autocast(key)
        shape = check_query_key(query, key, None, where)
        rule = as_mask(mask, shape, where=where)
        q_positions = check_positions(q_positions, "q_positions", shape[0], shape[2], where)
        kv_positions = check_positions(kv_positions, "kv_positions", shape[0], shape[3], where)
        check_domain(rule, q_positions, kv_positions, shape[2], shape[3], where)
        reasons = self.reasons(rule)
        if reasons:
            hint = "saccade.mechanisms.Softmax() takes every mask"
            raise unsupported(where, f"mask={type(rule).__name__}", reasons, hint=hint)
        return self.made(Inputs(query, key, rule, shape, q_positions, kv_positions))


def parts_of(mask: Mask) -> tuple[Mask, ...]:
    """The rules that a mask joins by ``&``; the mask itself if it joins none."""
    return mask.parts if isinstance(mask, And) else (mask,)


def scale_of(scale: float | None, head_dim: int) -> float:
    """The scale of dot products, ``head_dim ** -0.5`` for None."""
    return max(1, head_dim) ** -0.5 if scale is None else scale


def _table(positions: Positions, start: int | None, length: int, device: torch.device) -> Tensor:
    if isinstance(positions, Tensor):
        return torch.atleast_2d(positions.to(device)).clamp(min=-1)
    if isinstance(positions, range):
        return torch.arange(positions.start, positions.stop, positions.step, device=device)[None]
    first = 0 if start is None else start
    return torch.arange(first, first + length, device=device)[None]
