"""What is added to the scores, held so that any tile of it can be read, and its gradient collected, without the rest.

Axis legend: batch B · heads H · q_len L · kv_len S · rows R · columns C · distances T.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.arguments import instance
from saccade.engine.at_positions import AtPositions
from saccade.engine.grouping import take
from saccade.errors import type_error, value_error
from saccade.masks import Mask
from saccade.plan import Tile
from saccade.positions import Bias

__all__ = ["DenseTerm", "DistanceTerm", "HidingTerm", "Term", "bias_term"]


class Term(Protocol):
    """A matrix [B, H, L, S] that need not exist.

    Attributes:
        source: the tensor that gradients are taken of.
        is_written_out: whether reading a tile is a view, so that even the whole matrix can be read at once.
    """

    source: Tensor
    is_written_out: bool

    def of(self, source: Tensor) -> Term:
        """The same term read from another tensor of the same shape."""
        ...

    def in_order(self, rows: Tensor, kv_len: int) -> Term:
        """The same term with its rows in another order: row i is what row ``rows[i]`` was, int64 ``[L]``."""
        ...

    def read(self, tile: Tile) -> Tensor:
        """The part that a tile needs, broadcasting to ``[batch, heads, rows, columns]``; differentiable."""
        ...

    def at(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        """The term at indices of batch item, head, query and key, for kernels that ask pair by pair."""
        ...

    def collect(self, grad: Tensor, tile: Tile, grad_scores: Tensor) -> None:
        """Add the gradient of a tile, ``[batch, heads, rows, columns]``, to that of `source`."""
        ...


class DenseTerm(Term):
    """A tensor that broadcasts to the matrix.

    Args:
        source: ``[B | 1, H | 1, L | 1, S | 1]``.
    """

    is_written_out = True

    def __init__(self, source: Tensor):
        self.source = source

    def of(self, source: Tensor) -> DenseTerm:
        return DenseTerm(source)

    def in_order(self, rows: Tensor, kv_len: int) -> DenseTerm:
        del kv_len
        return DenseTerm(self.source.index_select(2, rows)) if self.source.shape[2] > 1 else self

    def read(self, tile: Tile) -> Tensor:
        part = _rows_of(self.source, tile)
        return take(part, tile.spans, 3) if part.shape[3] > 1 else part

    def at(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return _entry(self.source, b, h, q, kv)

    def collect(self, grad: Tensor, tile: Tile, grad_scores: Tensor) -> None:
        part = _rows_of(grad, tile)
        few = [axis for axis in range(3) if part.shape[axis] == 1 < grad_scores.shape[axis]]
        grad_scores = grad_scores.sum(few, keepdim=True) if few else grad_scores
        if part.shape[3] == 1:
            part += grad_scores.sum(3, keepdim=True)
            return
        start = 0
        for span in tile.spans:
            part[..., span.start : span.stop : span.step] += grad_scores[..., start : start + len(span)]
            start += len(span)


class DistanceTerm(Term):
    """A table read at the distance between query and key.

    Args:
        source: ``[B | 1, H | 1, L | 1, T]``: values at distances ``lowest``, ``lowest + 1``, …; beyond the ends, the
            value at the end.
        lowest: the first distance.
        first: distance of query 0 and key 0, where both follow one by one.
        q_addresses, kv_addresses: int64 ``[B | 1, L]`` and ``[B | 1, S]`` where they do not; distances are differences.
    """

    is_written_out = False

    def __init__(
        self,
        source: Tensor,
        lowest: int,
        first: int = 0,
        q_addresses: Tensor | None = None,
        kv_addresses: Tensor | None = None,
    ):
        self.source, self.lowest, self.first = source, lowest, first
        self.q_addresses, self.kv_addresses = q_addresses, kv_addresses

    def of(self, source: Tensor) -> DistanceTerm:
        return DistanceTerm(source, self.lowest, self.first, self.q_addresses, self.kv_addresses)

    def in_order(self, rows: Tensor, kv_len: int) -> DistanceTerm:
        source = self.source.index_select(2, rows) if self.source.shape[2] > 1 else self.source
        if self.q_addresses is None or self.kv_addresses is None:
            q, kv = (rows + self.first)[None], torch.arange(kv_len, device=rows.device)[None]
        else:
            q, kv = self.q_addresses.index_select(1, rows), self.kv_addresses
        return DistanceTerm(source, self.lowest, 0, q, kv)

    def read(self, tile: Tile) -> Tensor:
        table = _rows_of(self.source, tile)
        if self._is_toeplitz(tile):
            parts = []
            for span in tile.spans:
                runs = table[:, :, 0].index_select(-1, self._run(tile.rows, span))
                # Row r of the part is the run's piece that ends r entries later, backwards. A flip of the rows would
                # leave them across memory, and who reads them row by row would copy them first.
                backwards = torch.arange(tile.height - 1, -1, -1, device=self.source.device)
                parts.append(runs.flip(-1).unfold(-1, len(span), 1).index_select(-2, backwards))
            return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        index = self._index(tile)
        if table.shape[2] != 1:
            sizes = torch.broadcast_shapes(table.shape[:2], index.shape[:2])
            return table.expand(*sizes, -1, -1).gather(3, index.expand(*sizes, -1, -1))
        if len(index) == 1:
            return table[:, :, 0][:, :, index[0, 0]]
        sizes = (len(index), table.shape[1], *index.shape[2:])
        wide = table[:, :, 0].expand(len(index), -1, -1)
        return wide.gather(2, index.expand(-1, table.shape[1], -1, -1).flatten(2)).view(sizes)

    def at(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if self.q_addresses is None or self.kv_addresses is None:
            distance = q - kv + self.first
        else:
            one = b - b
            own, other = (x[b if len(x) > 1 else one, i] for x, i in ((self.q_addresses, q), (self.kv_addresses, kv)))
            distance = own - other
        return _entry(self.source, b, h, q, (distance - self.lowest).clamp(0, self.source.shape[3] - 1))

    def collect(self, grad: Tensor, tile: Tile, grad_scores: Tensor) -> None:
        table = _rows_of(grad, tile)
        addresses = (self.q_addresses, self.kv_addresses)
        if all(x is None or len(x) == 1 for x in addresses):
            grad_scores = _summed_to(grad_scores, table)  # items that stand alike are read alike
        if self._is_toeplitz(tile):
            start = 0
            for span in tile.spans:
                part = grad_scores[..., start : start + len(span)]
                table[:, :, 0].index_add_(-1, self._run(tile.rows, span), _diagonal_sums(part))
                start += len(span)
            return
        index = self._index(tile)
        if table.shape[2] != 1:
            sizes = grad_scores.shape
            added = torch.zeros(*sizes[:3], table.shape[3], dtype=table.dtype, device=table.device)
            added.scatter_add_(3, index.expand(sizes), grad_scores)
            table += _summed_to(added, table)
            return
        index = index.expand(len(grad_scores), 1, *grad_scores.shape[2:]).flatten(2)
        index = index.expand(-1, grad_scores.shape[1], -1)
        added = torch.zeros(*grad_scores.shape[:2], table.shape[3], dtype=table.dtype, device=table.device)
        added.scatter_add_(2, index, grad_scores.flatten(2))
        table += _summed_to(added[:, :, None], table)

    def _is_toeplitz(self, tile: Tile) -> bool:
        steps = {tile.rows.step, *(span.step for span in tile.spans)}
        is_alike = self.q_addresses is None and self.source.shape[2] == 1 and len(steps) == 1
        return is_alike and tile.height > 0 and tile.width > 0

    def _run(self, rows: range, span: range) -> Tensor:
        """Where the distances of a part stand in the table, from its last column in the first row upwards."""
        step, length = rows.step, len(rows) + len(span) - 1
        start = self.first + rows.start - span[-1]
        index = torch.arange(length, device=self.source.device) * step + (start - self.lowest)
        return index.clamp_(0, self.source.shape[3] - 1)

    def _index(self, tile: Tile) -> Tensor:
        """Where each pair stands in the table, int64 ``[B | 1, 1, R, C]``."""
        q, kv = self.q_addresses, self.kv_addresses
        if q is None or kv is None:
            columns = torch.cat([torch.arange(s.start, s.stop, s.step) for s in tile.spans]).to(self.source.device)
            rows = torch.arange(tile.rows.start, tile.rows.stop, tile.rows.step, device=self.source.device)
            distances = (rows[:, None] - columns + self.first)[None]
        else:
            q = take(q[tile.batch] if len(q) > 1 else q, (tile.rows,), 1)
            kv = take(kv[tile.batch] if len(kv) > 1 else kv, tile.spans, 1)
            distances = q[:, :, None] - kv[:, None]
        return (distances - self.lowest).clamp_(0, self.source.shape[3] - 1)[:, None]


class HidingTerm(Term):
    """A term, or nothing, with -inf at some queries and some keys.

    Args:
        term: what is added elsewhere.
        queries, keys: bool ``[B, H, L]`` and ``[B, H, S]``, True where the term is -inf.
        nothing: zeros ``[1, 1, 1, 1]``, read where there is no term.
    """

    is_written_out = False

    def __init__(self, term: Term | None, queries: Tensor, keys: Tensor, nothing: Tensor):
        self.term, self.queries, self.keys, self._nothing = term, queries, keys, nothing
        self.source = nothing if term is None else term.source

    def of(self, source: Tensor) -> HidingTerm:
        return self._around(None if self.term is None else self.term.of(source), self.queries)

    def in_order(self, rows: Tensor, kv_len: int) -> HidingTerm:
        term = None if self.term is None else self.term.in_order(rows, kv_len)
        return self._around(term, self.queries.index_select(2, rows))

    def _around(self, term: Term | None, queries: Tensor) -> HidingTerm:
        return HidingTerm(term, queries, self.keys, self._nothing)

    def read(self, tile: Tile) -> Tensor:
        keys = take(self.keys[tile.batch, tile.heads], tile.spans, 2)[:, :, None]
        hidden = keys | take(self.queries[tile.batch, tile.heads], (tile.rows,), 2)[..., None]
        inner = self._nothing if self.term is None else self.term.read(tile)
        return inner.expand(torch.broadcast_shapes(inner.shape, hidden.shape)).masked_fill(hidden, -math.inf)

    def at(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        inner = _entry(self._nothing, b, h, q, kv) if self.term is None else self.term.at(b, h, q, kv)
        return torch.where(self.queries[b, h, q] | self.keys[b, h, kv], -math.inf, inner)

    def collect(self, grad: Tensor, tile: Tile, grad_scores: Tensor) -> None:
        if self.term is not None:
            self.term.collect(grad, tile, grad_scores)


def bias_term(
    bias: Tensor | Bias,
    query: Tensor,
    shape: tuple[int, int, int, int],
    rule: Mask,
    origin: tuple[int, int],
    scale: float,
    where: str,
) -> Term:
    """What a user hands over as a bias, checked.

    Args:
        bias: a tensor that broadcasts to the matrix, or a rule that is read at distances.
        query: as the user gave it.
        shape: (batch, heads, q_len, kv_len).
        rule, origin: as `saccade.engine.at_positions.placed` tells them.
        scale: factor of the scores.
        where: the user's function, for the error.
    """
    if isinstance(bias, Bias):
        return _distances(bias, query, shape, rule, origin, scale, where)
    return _dense(bias, query, shape, where)


def _dense(bias: Tensor, query: Tensor, shape: tuple[int, int, int, int], where: str) -> DenseTerm:
    instance(where, "bias", bias, Tensor, "be a tensor, a saccade positions.Bias or None")
    if not bias.is_floating_point():
        hint = "True = may attend is a mask: pass it as mask=" if bias.dtype == torch.bool else None
        raise type_error(where, "bias", "be a float tensor", str(bias.dtype).removeprefix("torch."), hint=hint)
    if query.dtype == torch.float64:
        bias = bias.to(torch.float64)
    elif bias.dtype != query.dtype:
        bias = bias.to(torch.float32)  # which scores are computed in
    if bias.device != query.device:
        raise value_error(where, "device", "be the same for query and bias", f"{query.device} and {bias.device}")
    sizes = zip(reversed(bias.shape), reversed(shape), strict=False)
    if bias.dim() > 4 or any(own not in (1, size) for own, size in sizes):
        raise value_error(where, "bias", f"broadcast to {list(shape)}", list(bias.shape))
    return DenseTerm(bias.reshape((1,) * (4 - bias.dim()) + bias.shape))


def _distances(
    bias: Bias,
    query: Tensor,
    shape: tuple[int, int, int, int],
    rule: Mask,
    origin: tuple[int, int],
    scale: float,
    where: str,
) -> DistanceTerm:
    """The bias as a table of the distances that occur."""
    _, heads, q_len, kv_len = shape
    q, kv = _addresses(bias, shape, rule, origin, query.device)
    if q is None or kv is None:
        first = origin[0] - origin[1]
        lowest, highest = first - (kv_len - 1), first + q_len - 1
    elif q.numel() and kv.numel():
        first, lowest, highest = 0, int(q.min() - kv.max()), int(q.max() - kv.min())
    else:
        first, lowest, highest = 0, 0, 0
    if bias.reach is not None:
        lowest, highest = (min(max(end, -bias.reach), bias.reach) for end in (lowest, highest))
    distances = torch.arange(lowest, max(lowest, highest) + 1, device=query.device)
    with torch.autocast(query.device.type, enabled=False):
        table = bias.values(distances, query, scale)
    if table.dim() != 4 or any(own not in (1, size) for own, size in zip(table.shape, shape[:3], strict=False)):
        name = type(bias).__name__
        got = f"{name} for {table.shape[1]} heads" if table.dim() == 4 else name
        raise value_error(where, "bias", f"be made for {heads} heads, or one", got)
    # In the dtype of the scores: float64 for float64, else float32.
    return DistanceTerm(
        table.to(torch.float64 if query.dtype == torch.float64 else torch.float32), lowest, first, q, kv
    )


def _addresses(
    bias: Bias, shape: tuple[int, int, int, int], rule: Mask, origin: tuple[int, int], device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """What the bias subtracts, int64 ``[batch | 1, len]``; None where queries and keys follow one by one."""
    if isinstance(rule, AtPositions):
        return bias.address(rule.q_positions), bias.address(rule.kv_positions)
    q, kv = (
        torch.arange(first, first + length, device=device)[None]
        for first, length in zip(origin, shape[2:], strict=True)
    )
    # Of more queries than keys the first stand before position 0: of those only distances can be taken.
    begun = q[:, max(0, -origin[0]) :]
    if bias.address(begun) is begun:
        return None, None
    return bias.address(q), bias.address(kv)


def _rows_of(x: Tensor, tile: Tile) -> Tensor:
    """The part of ``x [B | 1, H | 1, L | 1, ...]`` for the rows of a tile."""
    x = x[tile.batch] if x.shape[0] > 1 else x
    x = x[:, tile.heads] if x.shape[1] > 1 else x
    return take(x, (tile.rows,), 2) if x.shape[2] > 1 else x


def _entry(x: Tensor, *place: Tensor) -> Tensor:
    """``x`` at a place for each of its four axes; an axis of one entry has that one everywhere."""
    return x[tuple(index if size > 1 else index - index for size, index in zip(x.shape, place, strict=True))]


def _summed_to(x: Tensor, like: Tensor) -> Tensor:
    """Sum over batch items and heads where the other tensor has one for all."""
    few = [axis for axis in range(2) if like.shape[axis] == 1 < x.shape[axis]]
    return x.sum(few, keepdim=True) if few else x


def _diagonal_sums(x: Tensor) -> Tensor:
    """``[..., R, C] -> [..., R + C - 1]``: sums over the pairs with the same row minus column, ascending."""
    rows, columns = x.shape[-2:]
    # With rows zeros after each row, cut into rows that are one shorter, every row stands one further to the right.
    skewed = F.pad(x.flip(-1), (0, rows)).flatten(-2)[..., : rows * (rows + columns - 1)]
    return skewed.unflatten(-1, (rows, rows + columns - 1)).sum(-2)
