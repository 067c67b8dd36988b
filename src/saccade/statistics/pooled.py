"""Pooled: a statistic that reduces the attention matrix to a small image for display."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from saccade.engine.tiles.grouped_heads import take
from saccade.statistics.row_block import Block, as_slice
from saccade.statistics.statistic import MatrixInfo, Statistic
from saccade.support.validation import check_choice, check_int

How = Literal["mean", "sum", "max"]


class _Cells(NamedTuple):
    cells: Tensor  # [batch, heads, q_bins, kv_bins]: sums, or maxima
    nonempty: Tensor  # [batch, heads, q_len]: 1 for a query that attends to something
    kv_bin: Tensor  # [kv_len]: the bin of each key
    info: MatrixInfo


@dataclasses.dataclass(frozen=True)
class Pooled(Statistic[_Cells, Tensor]):
    """The matrix pooled to at most ``bins`` × ``bins`` cells: ``[batch, heads, min(bins, q_len), min(bins, kv_len)]``.

    Neighbouring queries share a row of cells, and neighbouring keys a column. The sizes of bins differ by at most one,
    and a side that is shorter than ``bins`` is not pooled.

    Args:
        bins: maximum number of cells on either side, at least 1.
        how: "mean" averages over the queries of a bin and sums over its keys, so that rows still sum to 1. A cell is
            the attention of a typical query in one bin to the keys in another. Queries that attend to nothing do not
            count; a bin that contains only such queries is 0. "sum" adds over queries and keys. "max" is the largest
            weight of a cell (at least 0), so that thin diagonals and single keys stay visible. Use "mean" to compare
            values and "max" to look at patterns.

    Raises:
        TypeError, ValueError: ``bins`` is not an int of at least 1, or ``how`` is not "mean", "sum" or "max".

    Cost: about one addition or comparison per weight; O(q_len + kv_len + bins²) memory. Sums are computed in float64.

    Example:
        >>> from saccade import AttentionMatrix
        >>> x = torch.zeros(1, 1, 6, 4)
        >>> AttentionMatrix(x, x).pooled(2)
        tensor([[[[0.5000, 0.5000],
                  [0.5000, 0.5000]]]])
    """

    bins: int
    how: How = "mean"

    def __post_init__(self) -> None:
        check_int("bins", self.bins)
        check_choice("how", self.how, get_args(How))

    def start(self, info: MatrixInfo) -> _Cells:
        batch, heads, q_len, kv_len = info.shape
        device, dtype = info.device, info.dtype if self.how == "max" else info.sum_dtype
        q_bins, kv_bins = min(self.bins, q_len), min(self.bins, kv_len)
        kv_bin = torch.arange(kv_len, device=device) * kv_bins // max(kv_len, 1)
        least = info.hidden if self.how == "max" else 0.0
        cells = torch.full((batch, heads, q_bins, kv_bins), least, dtype=dtype, device=device)
        nonempty = torch.zeros(batch, heads, q_len if self.how == "mean" else 0, dtype=dtype, device=device)
        return _Cells(cells, nonempty, kv_bin, info)

    def add(self, state: _Cells, block: Block) -> _Cells:
        weights, q_bins = block.weights, state.cells.shape[2]
        runs = list(_runs_per_bin(block.rows, q_bins, state.info.shape[2]))
        if len(runs) == len(block.rows):
            rows = weights
        else:  # pool rows first, so that few rows remain to pool along the columns
            parts = (weights[..., start:stop, :] for _, start, stop in runs)
            reduced = [part.amax(-2) if self.how == "max" else part.sum(-2) for part in parts]
            rows = torch.stack(reduced, -2)
        bins = torch.tensor([q_bin for q_bin, _, _ in runs], device=weights.device)
        kv_bin = take(state.kv_bin, block.columns, 0).expand(rows.shape)
        least = state.info.hidden if self.how == "max" else 0.0
        cells = rows.new_full((*rows.shape[:-1], state.cells.shape[3]), least, dtype=state.cells.dtype)
        cells.scatter_reduce_(-1, kv_bin, rows.to(cells.dtype), "amax" if self.how == "max" else "sum")
        block_cells = state.cells[block.batch, block.heads]
        block_cells[:, :, bins] = _merged(block_cells[:, :, bins], cells, self.how)
        if self.how == "mean":
            state.nonempty[block.batch, block.heads, as_slice(block.rows)] = (weights.sum(-1) != 0).to(cells.dtype)
        return state

    def merge(self, state: _Cells, other: _Cells) -> _Cells:
        cells = _merged(state.cells, other.cells, self.how)
        return state._replace(cells=cells, nonempty=state.nonempty + other.nonempty)

    def finish(self, state: _Cells) -> Tensor:
        cells, (_, _, q_len, _) = state.cells, state.info.shape
        if self.how == "mean" and q_len:
            edges = torch.tensor(_edges(cells.shape[2], q_len), device=cells.device)
            counts = torch.nn.functional.pad(state.nonempty.cumsum(-1), (1, 0))[..., edges].diff(dim=-1)
            cells = cells / counts.clamp_min(1)[..., None]
        return cells.to(state.info.dtype)


def _merged(cells: Tensor, others: Tensor, how: How) -> Tensor:
    return torch.maximum(cells, others) if how == "max" else cells + others


def _edges(bins: int, length: int) -> list[int]:
    """Return the first index of each pooling bin, followed by the length; index i is in bin ``i * bins // length``."""
    return [-(-i * length // bins) for i in range(bins + 1)]


def _runs_per_bin(rows: range, bins: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield (bin, start, stop) for each pooling bin; start and stop are indices into ``rows``."""
    start = 0
    while start < len(rows):
        bin_index = rows[start] * bins // length
        stop = bisect_left(rows, -(-(bin_index + 1) * length // bins))
        yield bin_index, start, stop
        start = stop
