"""Around: a matrix that is made of another one."""

from __future__ import annotations

import torch

from saccade.matrix import Matrix

__all__ = ["Around"]


class Around(Matrix):
    """A matrix with the dtype, device and kind of rows of another one.

    Args:
        inner: the other one.
    """

    def __init__(self, inner: Matrix):
        self.inner = inner

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def kv_heads(self) -> int:
        return self.inner.kv_heads

    @property
    def is_stochastic(self) -> bool:
        return self.inner.is_stochastic
