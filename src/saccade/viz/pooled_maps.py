"""Pooled maps of a lazy matrix: the largest weight in each cell, or NaN if the entire cell is masked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.engine.tiles import tile_scores
from saccade.engine.tiles.tile_splitting import part_of
from saccade.matrix import AttentionMatrix, Block, Matrix
from saccade.mechanisms.features.feature_matrix import FeatureMatrix
from saccade.mechanisms.recurrences.recurrence_matrix import RecurrenceMatrix
from saccade.mechanisms.state_spaces import StateSpaceMatrix
from saccade.plan.key_ranges import Ints
from saccade.statistics import MatrixInfo, Pooled, Statistic
from saccade.statistics.row_block import as_slice
from saccade.support.errors import type_error, value_error
from saccade.support.torch_modes import without_autocast
from saccade.support.validation import is_integer
from saccade.viz.arrays import Array

_SURELY_HIDDEN = -500.0  # logs of hidden pairs are below this, those of visible pairs above


def check_batch_and_head(matrix: Matrix, batch: object, head: object) -> tuple[int, int]:
    """Check and return the batch item and head of a lazy matrix to draw; a matrix with a single head needs no ``head``.

    Raises:
        TypeError: an index is not an int.
        ValueError: an index is out of range, no head is passed although there are several, or the matrix is empty.
    """
    if 0 in matrix.shape:
        raise value_error("weights", "have no empty axis", f"shape {list(matrix.shape)}")
    heads = matrix.shape[1]
    if head is None:
        if heads > 1:
            hint = "mosaic draws all heads."
            raise value_error("head", f"be given, from 0 to {heads - 1}", None, hint=hint)
        head = 0
    indices = []
    for name, index, count in (("batch", batch, matrix.shape[0]), ("head", head, heads)):
        if not is_integer(index):
            raise type_error(name, "be an int", repr(index))
        if not 0 <= index < count:
            raise value_error(name, f"be from 0 to {count - 1}", index)
        indices.append(int(index))
    return indices[0], indices[1]


def check_no_lazy_options(**named: object) -> None:
    """Raise an error if dense weights are drawn with an option that only applies to lazy matrices."""
    for name, value in named.items():
        if value not in (None, 0):
            hint = "index an array yourself: weights[batch, head]"
            raise value_error(name, "be omitted for an array of weights", value, hint=hint)


def map_of(matrix: Matrix, batch: int, head: int, bins: int) -> Array:
    """Return the pooled map of one attention head, ``[min(bins, q_len), min(bins, kv_len)]``; see `maps_of`."""
    return _maps(matrix, batch, range(head, head + 1), bins)[0]


def maps_of(matrices: Matrix | Sequence[Matrix], batch: object, bins: int) -> Array:
    """Return pooled maps of all heads in one or several layers.

    Args:
        matrices: a matrix, or one for each layer, with equal shapes.
        batch: the batch item to draw.
        bins: maximum number of cells on either side.

    Returns:
        ``[heads, rows, columns]``, or ``[layers, heads, rows, columns]`` for several layers: the largest weight in each
        cell, or NaN if the entire cell is masked.

    Cost: one pass over each matrix; O(heads * bins ** 2) memory.
    """
    layers = [matrices] if isinstance(matrices, Matrix) else list(matrices)
    shapes = {matrix.shape for matrix in layers}
    if len(shapes) > 1:
        raise value_error("weights", "all be of one shape", sorted(map(list, shapes)))
    item, _ = check_batch_and_head(layers[0], batch, 0)
    maps = np.stack([_maps(matrix, item, range(matrix.shape[1]), bins) for matrix in layers])
    return maps[0] if isinstance(matrices, Matrix) else maps


def position_labels(matrix: Matrix, batch: int) -> tuple[Ints, Ints]:
    """Return the positions of a matrix's queries and keys, for numbering the axes of its map.

    Return two arrays, int64 ``[q_len]`` and ``[kv_len]``, where -1 marks padding.
    """
    _, _, q_len, kv_len = matrix.shape
    q, kv = matrix.positions(range(q_len), (range(kv_len),))
    rows, columns = (x.expand(matrix.shape[0], -1, -1, -1)[batch].flatten().cpu().numpy() for x in (q, kv))
    return rows, columns


def _maps(matrix: Matrix, batch: int, heads: range, bins: int) -> Array:
    """Return the pooled maps of consecutive heads in a lazy matrix, ``[heads, rows, columns]``."""
    return sweep_maps(matrix, batch, heads, bins)[0]


def sweep_maps(
    matrix: Matrix, batch: int, heads: range, bins: int, statistics: Sequence[Statistic[Any, Any]] = ()
) -> tuple[Array, tuple[Any, ...]]:
    """Compute pooled maps of a batch item, and other statistics, in one pass over the matrix.

    Args:
        matrix: a matrix with at least one query and one key.
        batch: the batch item to draw.
        heads: a range that contains one head or all heads.
        bins: maximum number of cells on either side.
        statistics: further statistics of this batch item and these heads.
    """
    info = MatrixInfo.of(matrix)._replace(shape=(1, len(heads), *matrix.shape[2:]))
    is_whole = max(matrix.shape[2:]) <= bins
    statistic, visible = Pooled(bins, "sum" if is_whole else "max"), _VisibleCells(info, bins)
    # With weights of mixed sign, draw the one farthest from 0; a matrix that fits is not pooled.
    is_signed = not is_whole and matrix.hidden == 0 and not isinstance(matrix, AttentionMatrix)
    state, below, states = statistic.start(info), statistic.start(info), [extra.start(info) for extra in statistics]
    with torch.no_grad(), without_autocast(matrix.device):
        for block in matrix.blocks(batch, heads[0] if len(heads) == 1 else None):
            local_heads = slice(block.heads.start - heads[0], block.heads.stop - heads[0])
            local_block = block._replace(batch=slice(0, 1), heads=local_heads)
            state = statistic.add(state, local_block)
            states = [extra.add(past, local_block) for extra, past in zip(statistics, states, strict=True)]
            if is_signed:
                below = statistic.add(below, local_block._replace(weights=-local_block.weights))
            if not isinstance(matrix, AttentionMatrix):
                visible.add_block(matrix, local_block, batch)
        if isinstance(matrix, AttentionMatrix):
            visible.add_all(matrix, batch, heads)
    largest = statistic.finish(state)[0]
    if is_signed:
        lowest = statistic.finish(below)[0]
        largest = torch.where(lowest > largest, -lowest, largest)
    cells = largest.masked_fill(~visible.cells, torch.nan).cpu().numpy()
    results = tuple(extra.finish(past) for extra, past in zip(statistics, states, strict=True))
    return cells.astype(np.float64 if cells.dtype == np.float64 else np.float32, copy=False), results


class _VisibleCells:
    """A record of which cells of a pooled map contain a visible pair, bool ``[heads, rows, columns]``.

    Args:
        info: description of the drawn part of the matrix.
        bins: maximum number of cells on either side.
    """

    def __init__(self, info: MatrixInfo, bins: int):
        _, heads, q_len, kv_len = info.shape
        rows, columns = min(bins, q_len), min(bins, kv_len)
        self.cells = torch.zeros(heads, rows, columns, dtype=torch.bool, device=info.device)
        self._row = torch.arange(q_len, device=info.device) * rows // q_len
        self._column = torch.arange(kv_len, device=info.device) * columns // kv_len

    def add_all(self, matrix: AttentionMatrix, batch: int, heads: range) -> None:
        """Mark the visible cells of a pooled map from the mask's tiles.

        Individual pairs are evaluated only in tiles that the mask partly hides.
        """
        inputs = matrix.inputs.current()
        differs_between_heads = inputs.rule.shape[1] > 1 or inputs.rule.calls_functions
        for head in heads if differs_between_heads else heads[:1]:
            local_heads = head - heads[0] if differs_between_heads else slice(None)
            for piece in (piece for tile in inputs.row_plan.tiles for piece in part_of(tile, batch, head, None)):
                for strip in piece.columns:
                    allowed = tile_scores.allowed(inputs, piece._replace(columns=(strip,)))
                    self._mark(local_heads, piece.rows, strip.keys, None if allowed is None else allowed[0, 0])

    def add_block(self, matrix: Matrix, block: Block, batch: int) -> None:
        """Mark the visible cells of a pooled map from a block of weights; a weight of exactly 0 counts as masked."""
        if isinstance(matrix, FeatureMatrix | RecurrenceMatrix | StateSpaceMatrix):
            # These masks are the same for all heads, and a weight that has decayed to 0 is not masked.
            item = slice(batch, batch + 1)
            for keys in block.columns if block.heads.start == 0 else ():
                self._mark(slice(None), block.rows, keys, matrix.visible.allowed(item, block.rows, keys)[0, 0])
            return
        logs = block.log_weights
        allowed = block.weights != 0 if logs is None else (logs > _SURELY_HIDDEN) | logs.isnan()
        for keys, part in block.by_range(allowed):
            for head in range(block.heads.start, block.heads.stop):
                self._mark(head, block.rows, keys, part[0, head - block.heads.start])

    def _mark(self, heads: int | slice, rows: range, keys: range, allowed: Tensor | None) -> None:
        """Mark the cells of a pooled map that contain an allowed pair.

        Args:
            heads: the heads to mark.
            rows, keys: the queries and keys of the pairs.
            allowed: bool ``[rows, keys]``; None if all pairs are allowed.
        """
        row, column = self._row[as_slice(rows)], self._column[as_slice(keys)]
        if allowed is None:
            self.cells[heads, row.unique()[:, None], column.unique()] = True
        else:
            i, j = allowed.expand(len(rows), len(keys)).nonzero(as_tuple=True)
            self.cells[heads, row[i], column[j]] = True
