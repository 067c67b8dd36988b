"""Places: where queries and keys stand, for statistics of distance."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from saccade.statistics.protocol import MatrixLike
from saccade.statistics.row_block import Block
from saccade.support.errors import type_error, value_error

__all__ = ["Places"]


@dataclasses.dataclass(frozen=True, eq=False)
class Places:
    """Where the tokens of a matrix stand. A statistic that is given none counts bottom-right: the last query at the
    last key.

    Args:
        q: positions of the queries, int64 ``[batch | 1, q_len]``.
        kv: positions of the keys, int64 ``[batch | 1, kv_len]``; a key below 0 is no token.

    Raises:
        TypeError, ValueError: not two int64 tensors of these shapes.

    Example:
        >>> from saccade import AttentionMatrix, masks
        >>> from saccade.statistics import LagMass, Places
        >>> x = torch.zeros(1, 1, 3, 4)
        >>> A = AttentionMatrix(x[:, :, :1], x, masks.Causal(), q_positions=range(1, 2), kv_positions=range(3))
        >>> A.ask(LagMass(0), LagMass(0, Places.of(A)))
        (tensor([[[0.]]]), tensor([[[0.5000]]]))
    """

    q: Tensor
    kv: Tensor

    def __post_init__(self) -> None:
        for name, x in (("q", self.q), ("kv", self.kv)):
            if not isinstance(x, Tensor) or x.dtype != torch.int64:
                raise type_error(name, "be an int64 tensor", getattr(x, "dtype", type(x).__name__))
            if x.dim() != 2:
                raise value_error(name, "be [batch or 1, len]", list(x.shape))

    @classmethod
    def of(cls, matrix: MatrixLike) -> Places:
        """Where a matrix says that its tokens stand."""
        _, _, q_len, kv_len = matrix.shape
        q, kv = matrix.positions(range(q_len), (range(kv_len),))
        return cls(q.expand(-1, 1, q_len, 1)[:, 0, :, 0], kv.expand(-1, 1, 1, kv_len)[:, 0, 0])

    @property
    def first(self) -> tuple[int, int] | None:
        """Positions of the first query and the first key, if all follow one by one; None if they do not."""
        if len(self.q) != 1 or len(self.kv) != 1 or not (self.q.numel() and self.kv.numel()):
            return None
        is_regular = all(bool((x.diff() == 1).all()) for x in (self.q[0], self.kv[0]))
        return (int(self.q[0, 0]), int(self.kv[0, 0])) if is_regular else None

    def of_block(self, block: Block) -> tuple[Tensor, Tensor]:
        """Positions of a block's rows and columns: ``[batch | 1, 1, rows, 1]``, ``[batch | 1, 1, 1, columns]``."""
        rows = slice(block.rows.start, block.rows.stop, block.rows.step)
        q = (self.q if len(self.q) == 1 else self.q[block.batch])[:, None, rows, None]
        kv = (self.kv if len(self.kv) == 1 else self.kv[block.batch])[:, None, None, block.keys]
        return q, kv
