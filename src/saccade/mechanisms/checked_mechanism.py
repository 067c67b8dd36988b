"""The base class of mechanisms whose queries, keys, mask and positions are checked before each call."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.check_inputs import autocast, check_query_key
from saccade.engine.positions.positioned_mask import check_domain
from saccade.masks import And, Mask, as_mask
from saccade.matrix import Matrix
from saccade.mechanisms.base import Mechanism
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.errors import unsupported
from saccade.support.numerics import wide_dtype


class Inputs(NamedTuple):
    """The checked queries, keys and mask of a mechanism's call.

    Attributes:
        query: ``[batch, heads, q_len, head_dim]``.
        key: ``[batch, kv_heads, kv_len, head_dim]``, in the dtype of the query, which is also the dtype of matrix
            products.
        rule: the mask.
        shape: (batch, heads, q_len, kv_len).
        q_positions, kv_positions: positions of the tokens; None if the caller passed none.
    """

    query: Tensor
    key: Tensor
    rule: Mask
    shape: tuple[int, int, int, int]
    q_positions: Positions | None
    kv_positions: Positions | None

    @property
    def wide(self) -> torch.dtype:
        """Dtype of the mechanism's computations: float64 for float64 inputs, and float32 for all others."""
        return wide_dtype(self.query.dtype)

    @property
    def is_placed(self) -> bool:
        """Whether the caller passed positions; a position below 0 then means padding."""
        return self.q_positions is not None or self.kv_positions is not None

    @property
    def starts(self) -> tuple[int | None, int | None]:
        """Positions of the first query and the first key; None for tokens that are not known to be consecutive."""
        q, kv = self.q_positions, self.kv_positions
        first = 0 if self.is_placed else self.shape[3] - self.shape[2]
        return first if q is None else q.first, 0 if kv is None else kv.first

    def position_tables(self) -> tuple[Tensor, Tensor]:
        """Return the positions of queries and keys, int64 ``[batch | 1, len]`` each, with -1 for padding."""
        _, _, q_len, kv_len = self.shape
        q, kv = self.q_positions, self.kv_positions
        if q is None:
            first = 0 if self.is_placed else kv_len - q_len
            rows = torch.arange(first, first + q_len, device=self.query.device)[None]
        else:
            rows = q.on(self.query.device).clamp(min=-1)
        if kv is None:
            return rows, torch.arange(kv_len, device=self.query.device)[None]
        return rows, kv.on(self.query.device).clamp(min=-1)


class CheckedMechanism(Mechanism):
    """The base class of mechanisms that compute their matrix from checked inputs."""

    @abstractmethod
    def _matrix_of(self, inputs: Inputs) -> Matrix:
        """Return the attention matrix of this mechanism for checked inputs."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: object = None,
        q_positions: GivenPositions = None,
        kv_positions: GivenPositions = None,
    ) -> Matrix:
        return self._matrix_of(self._inputs(query, key, mask, q_positions, kv_positions))

    def _inputs(
        self, query: Tensor, key: Tensor, mask: object, q_positions: GivenPositions, kv_positions: GivenPositions
    ) -> Inputs:
        """Check the inputs of a mechanism's call and return them."""
        query, key = autocast(query), autocast(key)
        shape = check_query_key(query, key, None)
        rule = as_mask(mask, shape)
        batch, _, q_len, kv_len = shape
        q = kv = None
        if q_positions is not None:
            q = Positions.of(q_positions, "q_positions", length=q_len, batch=batch)
        if kv_positions is not None:
            kv = Positions.of(kv_positions, "kv_positions", length=kv_len, batch=batch)
        check_domain(rule, q, kv, shape[2], shape[3])
        reasons = self.reasons(rule)
        if reasons:
            hint = "saccade.mechanisms.Softmax() supports every mask"
            raise unsupported(f"mask={type(rule).__name__}", reasons, hint=hint)
        return Inputs(query, key, rule, shape, q, kv)


def parts_of(mask: Mask) -> tuple[Mask, ...]:
    """Return the masks that a mask combines with ``&``, or the mask itself if it is not such a combination."""
    return mask.parts if isinstance(mask, And) else (mask,)


def scale_of(scale: float | None, head_dim: int) -> float:
    """Return the scale of dot products: ``scale``, or ``head_dim ** -0.5`` if it is None."""
    return max(1, head_dim) ** -0.5 if scale is None else scale
