"""Softmax: exact attention."""

from __future__ import annotations

from torch import Tensor

from saccade.attention_matrix import AttentionMatrix, Impl
from saccade.mechanisms.base import Mechanism
from saccade.token_positions import Positions

__all__ = ["Softmax"]


class Softmax(Mechanism):
    """Makes the `AttentionMatrix`; owns what softmax attention can be told.

    Args:
        scale, softcap, impl: see `saccade.AttentionMatrix`.

    Example:
        >>> import torch
        >>> query = key = torch.ones(1, 2, 4, 8)
        >>> Softmax()(query, key).shape
        (1, 2, 4, 4)
    """

    def __init__(self, *, scale: float | None = None, softcap: float | None = None, impl: Impl = "auto"):
        super().__init__()
        self.scale, self.softcap, self.impl = scale, softcap, impl

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        *,
        mask: object = None,
        q_positions: Positions = None,
        kv_positions: Positions = None,
    ) -> AttentionMatrix:
        return AttentionMatrix(
            query,
            key,
            mask,
            scale=self.scale,
            softcap=self.softcap,
            impl=self.impl,
            q_positions=q_positions,
            kv_positions=kv_positions,
        )

    def extra_repr(self) -> str:
        return f"scale={self.scale}, softcap={self.softcap}, impl={self.impl!r}"
