"""Transposed: the lazy transpose ``A.mT`` of a matrix."""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import Tensor

from saccade.statistics.statistic import DENSE_LIMIT, MatrixLike

M = TypeVar("M", bound=MatrixLike)


class Transposed(Generic[M]):
    """The transposed matrix ``A.mT``. Its rows are not distributions, so it supports only products."""

    def __init__(self, matrix: M):
        self._matrix = matrix

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the transposed matrix, (batch, heads, kv_len, q_len)."""
        batch, heads, q_len, kv_len = self._matrix.shape
        return (batch, heads, kv_len, q_len)

    @property
    def mT(self) -> M:
        """The original matrix."""
        return self._matrix

    def __matmul__(self, x: Tensor) -> Tensor:
        """Return the product of the transposed matrix and a tensor, ``A.mT @ x``; see `Matrix.rmatmul`."""
        return self._matrix.rmatmul(x)

    def to_dense(self, *, limit: int = DENSE_LIMIT) -> Tensor:
        """Return the transposed weights as a dense tensor, ``[batch, heads, kv_len, q_len]``."""
        return self._matrix.to_dense(limit=limit).mT

    def __repr__(self) -> str:
        return f"{self._matrix!r}.mT"
