"""Bias terms: matrices that are added to the scores. They are read and differentiated one tile at a time.

Axis legend: batch B · heads H · q_len L · kv_len S · rows R · columns C · distances T.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from saccade.engine.tiles.grouped_heads import add_at, take
from saccade.plan import Tile


class Term(Protocol):
    """A bias term: a matrix ``[B, H, L, S]`` that is added to the scores. It need not exist in memory.

    Attributes:
        source: the tensor that receives the gradients.
        is_materialised: whether reading a tile returns a view, so that reading the full matrix takes no memory.
    """

    source: Tensor
    is_materialised: bool

    def of(self, source: Tensor) -> Term:
        """Return this bias term with a different source tensor of the same shape."""
        ...

    def permuted(self, rows: Tensor, kv_len: int) -> Term:
        """Return the bias term with its rows permuted: row i is the former row ``rows[i]``, int64 ``[L]``."""
        ...

    def read(self, tile: Tile) -> Tensor:
        """Return the bias of a tile, which is differentiable and broadcasts to ``[batch, heads, rows, columns]``."""
        ...

    def at(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """Return the bias at the given batch, head, query and key indices, for kernels that read individual pairs."""
        ...

    def accumulate_gradient(self, grad: Tensor, tile: Tile, grad_scores: Tensor) -> None:
        """Add the gradient ``grad_scores`` of a tile's bias to ``grad``, the gradient of `source`."""
        ...


class DenseTerm(Term):
    """A bias term stored as a tensor that broadcasts to the matrix.

    Args:
        source: ``[B | 1, H | 1, L | 1, S | 1]``.
    """

    is_materialised = True

    def __init__(self, source: Tensor):
        self.source = source

    def of(self, source: Tensor) -> DenseTerm:
        return DenseTerm(source)

    def permuted(self, rows: Tensor, kv_len: int) -> DenseTerm:
        return DenseTerm(self.source.index_select(2, rows)) if self.source.shape[2] > 1 else self

    def read(self, tile: Tile) -> Tensor:
        part = rows_of(self.source, tile)
        return take(part, tile.spans, 3) if part.shape[3] > 1 else part

    def at(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return entry(self.source, b, h, q, kv)

    def accumulate_gradient(self, grad: Tensor, tile: Tile, grad_scores: Tensor) -> None:
        part = rows_of(grad, tile)
        few = [axis for axis in range(3) if part.shape[axis] == 1 < grad_scores.shape[axis]]
        grad_scores = grad_scores.sum(few, keepdim=True) if few else grad_scores
        if part.shape[3] == 1:
            part.add_(grad_scores.sum(3, keepdim=True))
        else:
            add_at(part, grad_scores, tile.spans, 3)


class MaskedTerm(Term):
    """A bias term that also masks some queries and keys with -inf.

    Args:
        term: the bias for queries and keys that are not masked; None if it is 0.
        queries, keys: bool ``[B, H, L]`` and ``[B, H, S]``, True where the bias is -inf.
        nothing: zeros ``[1, 1, 1, 1]``, used if ``term`` is None.
    """

    is_materialised = False

    def __init__(self, term: Term | None, queries: Tensor, keys: Tensor, nothing: Tensor):
        self.term, self.queries, self.keys, self._nothing = term, queries, keys, nothing
        self.source = nothing if term is None else term.source

    def of(self, source: Tensor) -> MaskedTerm:
        return self._around(None if self.term is None else self.term.of(source), self.queries)

    def permuted(self, rows: Tensor, kv_len: int) -> MaskedTerm:
        term = None if self.term is None else self.term.permuted(rows, kv_len)
        return self._around(term, self.queries.index_select(2, rows))

    def _around(self, term: Term | None, queries: Tensor) -> MaskedTerm:
        return MaskedTerm(term, queries, self.keys, self._nothing)

    def read(self, tile: Tile) -> Tensor:
        inner = self._nothing if self.term is None else self.term.read(tile)
        return inner.masked_fill(self.hidden(tile), -math.inf)

    def hidden(self, tile: Tile) -> Tensor:
        """Return which pairs of a tile this bias masks with -inf, bool ``[batch, heads, rows, columns]``."""
        keys = take(self.keys[tile.batch, tile.heads], tile.spans, 2)[:, :, None]
        return keys | take(self.queries[tile.batch, tile.heads], (tile.rows,), 2)[..., None]

    def at(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        inner = entry(self._nothing, b, h, q, kv) if self.term is None else self.term.at(b, h, q, kv)
        return torch.where(self.queries[b, h, q] | self.keys[b, h, kv], -math.inf, inner)

    def accumulate_gradient(self, grad: Tensor, tile: Tile, grad_scores: Tensor) -> None:
        if self.term is not None:
            self.term.accumulate_gradient(grad, tile, grad_scores)


def rows_of(x: Tensor, tile: Tile) -> Tensor:
    """Slice a bias tensor ``x [B | 1, H | 1, L | 1, ...]`` to the batch items, heads and rows of a tile."""
    x = x[tile.batch] if x.shape[0] > 1 else x
    x = x[:, tile.heads] if x.shape[1] > 1 else x
    return take(x, (tile.rows,), 2) if x.shape[2] > 1 else x


def entry(x: Tensor, *place: Tensor) -> Tensor:
    """Index a bias tensor by four tensors, one per axis, and return the entries. Axes of size 1 are broadcast."""
    return x[tuple(index if size > 1 else index - index for size, index in zip(x.shape, place, strict=True))]


def summed_to(x: Tensor, like: Tensor) -> Tensor:
    """Sum a bias gradient over the batch and head axes that have size 1 in ``like``, a tensor shaped like the bias."""
    few = [axis for axis in range(2) if like.shape[axis] == 1 < x.shape[axis]]
    return x.sum(few, keepdim=True) if few else x
