"""LinearTimeMatrix: the base class of matrices with linear-time products. Weights are only computed on request."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from saccade.engine import dropout
from saccade.matrix import Matrix
from saccade.support.torch_modes import without_autocast

_ENTRIES = 1 << 18  # about a megabyte of weights, which stays in a core's L2 cache


class LinearTimeMatrix(Matrix):
    """The base class of matrices whose products take linear time and need the weights only with dropout.

    Args:
        shape: (batch, heads, q_len, kv_len).
        kv_heads: number of key and value heads.
        dtype: dtype of the inputs and of matrix products.
        device: device of the inputs.
    """

    # Class attributes, since instance attributes do not implement the abstract properties of a matrix.
    shape: tuple[int, int, int, int] = (0, 0, 0, 0)
    kv_heads: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")

    def __init__(self, shape: tuple[int, int, int, int], kv_heads: int, *, dtype: torch.dtype, device: torch.device):
        self.shape, self.kv_heads, self.dtype, self.device = shape, kv_heads, dtype, device

    def matmul(self, value: Tensor, *, dropout_p: float = 0.0, seed: int | None = None) -> Tensor:
        """Return ``A @ value`` in linear time, or pair by pair in quadratic time with dropout; see `Matrix.matmul`."""
        value = self._operand(value, "value", self.kv_heads, self.shape[3])
        dropout.check(dropout_p, seed)
        if dropout_p > 0.0:
            return super().matmul(value, dropout_p=dropout_p, seed=seed)
        with without_autocast(self.device):
            return self._times(value).to(value.dtype)

    @abstractmethod
    def _times(self, value: Tensor) -> Tensor:
        """Return ``A @ value`` for a checked value, computed in float32 or wider."""

    def _pieces(self, batch: int | None, head: int | None, rows: range | None) -> Iterator[tuple[slice, slice, range]]:
        """Yield the items, heads and rows of each block of weights. Large matrices are split by head and row."""
        self._check_part(batch, head, rows)
        items = range(self.shape[0]) if batch is None else range(batch, batch + 1)
        heads = range(self.shape[1]) if head is None else range(head, head + 1)
        rows = range(self.shape[2]) if rows is None else rows
        if not (items and heads and rows and self.shape[3]):
            return
        if len(items) * len(heads) * len(rows) * self.shape[3] <= _ENTRIES:
            yield slice(items.start, items.stop), slice(heads.start, heads.stop), rows
            return
        height = max(1, _ENTRIES // self.shape[3])
        for b in items:
            for h in heads:
                for start in range(rows.start, rows.stop, height):
                    yield slice(b, b + 1), slice(h, h + 1), range(start, min(start + height, rows.stop))


def divide_rows(x: Tensor, total: Tensor, eps: float = 0.0) -> Tensor:
    """Divide each row by its total plus eps. A row whose total is 0 becomes 0 and gets no gradient."""
    empty = total == 0
    if eps:  # the entries of a row may cancel out
        empty = empty & (x == 0).all(-1, keepdim=True)
    out = x / (total + eps).masked_fill(empty, math.inf)
    return out.masked_fill(empty, 0.0) if out.requires_grad else out


def take_rows(x: Tensor, order: Tensor) -> Tensor:
    """Gather the tokens of ``[batch, heads, len, width]`` with the indices ``[batch | 1, indices]``."""
    if len(order) == 1:
        return x.index_select(2, order[0])
    return x.gather(2, order[:, None, :, None].expand(len(x), x.shape[1], order.shape[1], x.shape[3]))
