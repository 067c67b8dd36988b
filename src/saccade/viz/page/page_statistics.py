"""Statistics used only by pages: the strongest weights of each query and key, and maps without sinks."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.statistics import Block, MatrixInfo, Statistic
from saccade.statistics.row_block import as_slice


class Strong(NamedTuple):
    """The strongest weights of every query and of every key, that is, those farthest from 0.

    If a query or key has fewer than k weights, the remaining indices are -1.

    Attributes:
        weights, keys: the strongest weights of each query and their keys, ``[batch, heads, q_len, k]``.
        received, queries: the strongest weights of each key and their queries, ``[batch, heads, kv_len, k]``.
    """

    weights: Tensor
    keys: Tensor
    received: Tensor
    queries: Tensor


@dataclasses.dataclass(frozen=True)
class StrongestPairs(Statistic[Strong, Strong]):
    """A statistic for pages: the strongest keys of each query and the strongest queries of each key, as `Strong`.

    Args:
        k: number of weights for each query and key.

    Cost: two top-k selections from the weights; O((q_len + kv_len) * k) memory.
    """

    k: int

    def start(self, info: MatrixInfo) -> Strong:
        batch, heads, q_len, kv_len = info.shape
        parts = []
        for count in (q_len, kv_len):
            parts.append(torch.zeros(batch, heads, count, self.k, dtype=info.dtype, device=info.device))
            parts.append(torch.full((batch, heads, count, self.k), -1, device=info.device))
        return Strong(*parts)

    def add(self, state: Strong, block: Block) -> Strong:
        finite = block.weights.nan_to_num(0.0)  # NaN is never among the strongest
        sizes = finite.abs()
        strongest = sizes.topk(min(self.k, sizes.shape[-1]), -1).indices
        where = (block.batch, block.heads, as_slice(block.rows), slice(0, strongest.shape[-1]))
        weights = finite.gather(-1, strongest)
        state.weights[where] = weights
        state.keys[where] = block.keys[strongest].where(weights != 0, -1)
        strongest = sizes.topk(min(self.k, sizes.shape[-2]), -2).indices
        new = finite.gather(-2, strongest).mT, block.queries[strongest].mT
        index = (block.batch, block.heads, block.keys)
        state.received[index], state.queries[index] = _larger(
            (state.received[index], state.queries[index]), new, self.k
        )
        return state

    def merge(self, state: Strong, other: Strong) -> Strong:
        rows = state.weights + other.weights, torch.maximum(state.keys, other.keys)
        columns = _larger((state.received, state.queries), (other.received, other.queries), self.k)
        return Strong(*rows, *columns)

    def finish(self, state: Strong) -> Strong:
        return state


class _Cells(NamedTuple):
    cells: Tensor  # [batch, heads, rows of cells, columns]
    row: Tensor  # [q_len]: the row of cells that each query belongs to


@dataclasses.dataclass(frozen=True)
class PooledColumns(Statistic[_Cells, Tensor]):
    """A statistic that pools selected columns of a map, leaving out some keys, ``[batch, heads, rows, columns]``.

    A cell that contains an attention sink then shows the weights of its other keys.

    Args:
        bins: maximum number of cells on each side, as in `saccade.statistics.Pooled`.
        columns: for each column of the result, the keys to pool.
    """

    bins: int
    columns: tuple[tuple[int, ...], ...]

    def start(self, info: MatrixInfo) -> _Cells:
        batch, heads, q_len, _ = info.shape
        rows = min(self.bins, q_len)
        cells = torch.zeros(batch, heads, rows, len(self.columns), dtype=info.dtype, device=info.device)
        return _Cells(cells, torch.arange(q_len, device=info.device) * rows // q_len)

    def add(self, state: _Cells, block: Block) -> _Cells:
        cells, row = state.cells[block.batch, block.heads], state.row[as_slice(block.rows)]
        for column, keys in enumerate(self.columns):
            indices = torch.tensor(keys, dtype=torch.int64, device=row.device).expand(len(block.rows), -1)
            if len(keys):
                weights = block.at_keys(indices)
                strongest = weights.gather(-1, weights.abs().argmax(-1, keepdim=True))[..., 0]
                new = _strongest_of(strongest, row, cells.shape[2])
                cells[..., column] = torch.where(new.abs() > cells[..., column].abs(), new, cells[..., column])
        return state

    def merge(self, state: _Cells, other: _Cells) -> _Cells:
        return state._replace(cells=torch.where(other.cells.abs() > state.cells.abs(), other.cells, state.cells))

    def finish(self, state: _Cells) -> Tensor:
        return state.cells


def _larger(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], k: int) -> tuple[Tensor, Tensor]:
    """Merge two lists of strongest weights and their indices; keep only the k weights farthest from 0."""
    weights, indices = (torch.cat(pair, -1) for pair in zip(one, other, strict=True))
    best = weights.abs().topk(k, -1).indices
    weights = weights.gather(-1, best)
    return weights, indices.gather(-1, best).where(weights != 0, -1)


def _strongest_of(values: Tensor, row: Tensor, rows: int) -> Tensor:
    """Return the strongest weight among the queries in each row of a pooled map, ``[..., rows]``.

    Args:
        values: one weight for each query, ``[..., q_len]``.
        row: the map row of each query, ``[q_len]``.
        rows: number of rows in the map.
    """
    index, start = row.expand(values.shape), values.new_zeros(*values.shape[:-1], rows)
    most = start.scatter_reduce(-1, index, values, "amax")
    least = start.scatter_reduce(-1, index, values, "amin")
    return torch.where(-least > most, least, most)
