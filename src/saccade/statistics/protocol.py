"""MatrixLike: what statistics need of a `saccade.Matrix`, which is built on top of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from saccade.plan import Ranges
from saccade.statistics.row_block import Block
from saccade.statistics.statistic import Statistic

__all__ = ["MatrixLike"]


class MatrixLike(Protocol):
    """A matrix that answers questions; see `saccade.Matrix` for what each member means."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, q_len, kv_len)."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the products."""

    @property
    def device(self) -> torch.device:
        """Where the ingredients are."""

    @property
    def is_stochastic(self) -> bool:
        """Whether rows are distributions."""

    @property
    def hidden(self) -> float:
        """What stands at pairs that no block names."""

    def positions(self, rows: range, columns: Ranges) -> tuple[Tensor, Tensor]:
        """Where queries and keys stand."""

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        """Complete rows."""

    def compute(self, *statistics: Statistic[Any, Any]) -> tuple[Any, ...]:
        """Answers to several questions."""

    def rmatmul(self, x: Tensor) -> Tensor:
        """``A.mT @ x``."""

    def to_dense(self, *, limit: int) -> Tensor:
        """All weights, ``[batch, heads, q_len, kv_len]``."""
