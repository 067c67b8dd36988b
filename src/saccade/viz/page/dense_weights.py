"""WrittenOut: dense weights, computed elsewhere, as a matrix."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from saccade.matrix import Block, Matrix


class WrittenOut(Matrix):
    """A matrix of dense weights, ``[batch, heads, q_len, kv_len]``; NaN marks unknown weights."""

    def __init__(self, given: Tensor | npt.NDArray[Any]):
        if isinstance(given, np.ndarray):  # a copy that torch can read, of any byte order and width
            is_known = given.dtype in (np.float16, np.float32, np.float64)
            given = torch.from_numpy(given.astype(given.dtype if is_known else np.float32, order="C"))
        self._weights = given.detach() if given.is_floating_point() else given.float()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, q_len, kv_len = self._weights.shape
        return (batch, heads, q_len, kv_len)

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.dtype

    @property
    def device(self) -> torch.device:
        return self._weights.device

    @property
    def kv_heads(self) -> int:
        return self.shape[1]

    @cached_property
    def is_signed(self) -> bool:
        """True if there are weights below 0."""
        return bool((self._weights < 0).any())

    @cached_property
    def is_stochastic(self) -> bool:
        sums = self._weights.float().sum(-1)
        tolerance = 0.01 if self._weights.dtype in (torch.float16, torch.bfloat16) else 1e-4
        is_sum = ((sums - 1).abs() < tolerance) | (sums == 0) | sums.isnan()
        return not self.is_signed and bool(is_sum.all())

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        items, heads, q_len, kv_len = self.shape
        lines = range(q_len) if rows is None else rows
        for item in range(items) if batch is None else (batch,):
            for own in range(heads) if head is None else (head,):
                weights = self._weights[item, own, lines.start : lines.stop]
                wide = weights.to(torch.promote_types(weights.dtype, torch.float32))[None, None]
                yield Block(slice(item, item + 1), slice(own, own + 1), lines, (range(kv_len),), wide)
