"""LinearTimeMatrix: products take linear time, and single weights are written out only where they are asked for."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from saccade.engine import dropout
from saccade.matrix import Matrix

__all__ = ["LinearTimeMatrix"]


class LinearTimeMatrix(Matrix):
    """What matrices in linear time share: a product that needs no weights, except those that dropout leaves out.

    Args:
        dtype: of the inputs and of the products.
    """

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def matmul(self, value: Tensor, *, dropout_p: float = 0.0, seed: int | None = None) -> Tensor:
        """``A @ value`` in linear time; see `Matrix.matmul`. With dropout, pair by pair: in quadratic time."""
        value = self._operand(value, "value", self.kv_heads, self.shape[3])
        dropout.check(dropout_p, type(self).__name__)
        dropout.check_seed(seed, type(self).__name__)
        if dropout_p > 0.0:
            return super().matmul(value, dropout_p=dropout_p, seed=seed)
        with torch.autocast(self.device.type, enabled=False):
            return self._times(value).to(value.dtype)

    @abstractmethod
    def _times(self, value: Tensor) -> Tensor:
        """The product with a value of the right shape and dtype; in float32 or wider."""
