"""Block: complete rows of a matrix, the unit in which statistics process a matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.plan import Ranges

_ENTRIES = 1 << 18  # maximum number of weights in a block: a megabyte
_LEAST_LOG = -1000.0  # below the log of any positive number in any dtype; its square is finite


class _Fields(NamedTuple):
    batch: slice
    heads: slice
    rows: range
    columns: Ranges
    weights: Tensor
    log_weights: Tensor | None = None
    lse: Tensor | None = None
    hidden: float = 0.0


class Block(_Fields):
    """A block of complete rows of a matrix, restricted to the columns where the rows can be nonzero.

    Values that several statistics share are computed once, on first use.

    Attributes:
        batch, heads: slices of batch items and heads: a single head, or complete groups of heads that share keys.
        rows: indices of the queries.
        columns: indices of the keys, as ranges; the rows are 0 in all other columns.
        weights: ``[batch, heads, rows, columns]``, float32 or wider.
        log_weights: natural log of the weights if the mechanism computes it, finite even for a weight of 0, and precise
            for weights close to 0 or 1; None otherwise.
        lse: natural log of the softmax denominator of each row, ``[batch, heads, rows]``, if the weights are a softmax;
            -inf in a row that attends to nothing. None otherwise.
        hidden: the value of all other columns; statistics do not count these as weights.
    """

    @cached_property
    def logs(self) -> Tensor:
        """Natural log of the block's weights, finite even for a weight of 0, so that 0 · log 0 is 0 and not NaN."""
        if self.log_weights is not None:
            return self.log_weights
        return self.weights.log().clamp_min_(_LEAST_LOG)

    @cached_property
    def entropy(self) -> Tensor:
        """Shannon entropy of the block's rows in nats, ``[batch, heads, rows]``."""
        # Subtract from 0 instead of negating, so that a row with one key gives 0, not -0.
        return 0.0 - torch.linalg.vecdot(self.weights, self.logs)

    @cached_property
    def largest(self) -> Tensor:
        """Largest weight of each row of the block, at least 0, ``[batch, heads, rows]``."""
        # Columns outside the ranges are 0, so the largest weight is 0 if all weights in the ranges are negative.
        return self.weights.amax(-1).clamp_min_(self.hidden)

    @cached_property
    def column_sums(self) -> Tensor:
        """Sums of the block's columns, ``[batch, heads, columns]``."""
        # A matrix product with ones reads the weights once, in memory order, at half the cost of sum(-2).
        return (self.weights.new_ones(1, self.weights.shape[2]) @ self.weights)[..., 0, :]

    @cached_property
    def keys(self) -> Tensor:
        """Indices of the block's keys, int64 ``[columns]``, ascending if the ranges are."""
        spans = [_indices(span, self.weights.device) for span in self.columns]
        return spans[0] if len(spans) == 1 else torch.cat(spans)

    @cached_property
    def queries(self) -> Tensor:
        """Indices of the block's queries, int64 ``[rows]``."""
        return _indices(self.rows, self.weights.device)

    def by_range(self, x: Tensor) -> Iterator[tuple[range, Tensor]]:
        """Yield each key range of the block, with the corresponding columns of a tensor ``[..., columns]``."""
        start = 0
        for span in self.columns:
            yield span, x[..., start : start + len(span)]
            start += len(span)

    @cached_property
    def is_ascending(self) -> bool:
        """Whether the block's key ranges are in ascending order."""
        return all(one[-1] < other[0] for one, other in zip(self.columns, self.columns[1:], strict=False))

    def at_keys(self, indices: Tensor) -> Tensor:
        """Return the block's weights at given keys, ``[batch, heads, rows, n]``; 0 for keys outside its columns.

        Args:
            indices: indices of keys, int64 ``[rows, n]``. Indices may be out of range.
        """
        if len(self.columns) == 1 and self.columns[0].step == 1:
            span = self.columns[0]
            is_there = (indices >= span.start) & (indices < span.stop)
            index = (indices - span.start).clamp_(0, len(span) - 1)
        else:
            keys, order = (self.keys, None) if self.is_ascending else self.keys.sort()
            index = torch.searchsorted(keys, indices.contiguous()).clamp_max_(len(keys) - 1)
            is_there = keys[index] == indices
            index = index if order is None else order[index]
        gathered = self.weights.gather(-1, index.expand(*self.weights.shape[:2], -1, -1))
        return torch.where(is_there, gathered, 0.0)


def row_blocks(
    shape: tuple[int, int, int, int],
    weights_of: Callable[[int, int, range], Tensor],
    batch: int | None = None,
    head: int | None = None,
    rows: range | None = None,
) -> Iterator[Block]:
    """Yield blocks of complete rows of a matrix, each of one head and batch item, and of at most a megabyte.

    Args:
        shape: the shape of the matrix.
        weights_of: computes the weights ``[rows, kv_len]`` for a batch item, a head and a range of rows.
        batch, head, rows: the part of the matrix to read; all batch items, heads and rows if None.
    """
    items, heads, q_len, kv_len = shape
    rows = range(q_len) if rows is None else range(q_len)[as_slice(rows)]
    step = max(1, _ENTRIES // max(kv_len, 1))
    for b in range(items) if batch is None else (batch,):
        for h in range(heads) if head is None else (head,):
            for start in range(rows.start, rows.stop, step):
                part = range(start, min(start + step, rows.stop))
                weights = weights_of(b, h, part)[None, None]
                yield Block(slice(b, b + 1), slice(h, h + 1), part, (range(kv_len),), weights)


def as_slice(span: range) -> slice:
    """Convert a range of row or key indices of a block to a slice."""
    return slice(span.start, span.stop, span.step)


def _indices(span: range, device: torch.device) -> Tensor:
    return torch.arange(span.start, span.stop, span.step, device=device)
