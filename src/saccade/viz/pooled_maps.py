"""Maps of a lazy matrix: the largest weight of every cell, and the cells that its mask hides whole."""

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
from saccade.mechanisms.state_spaces.state_space_matrix import StateSpaceMatrix
from saccade.plan.key_ranges import Ints
from saccade.statistics import Fold, Outline, Pooled
from saccade.statistics.row_block import as_slice
from saccade.support.errors import type_error, value_error
from saccade.support.torch_modes import without_autocast
from saccade.support.validation import is_integer
from saccade.viz.arrays import Array

__all__ = ["chosen", "map_of", "maps_of", "places_of", "refuse_choice", "swept"]

_SURELY_HIDDEN = -500.0  # logs of hidden pairs stop below that, and those of pairs that are seen stay above


def chosen(matrix: Matrix, batch: object, head: object) -> tuple[int, int]:
    """The batch item and the head that were named; the only head, where there is one.

    Raises:
        TypeError: no ints.
        ValueError: one that is not there, none named where there are several, or a matrix without entries.
    """
    if 0 in matrix.shape:
        raise value_error("weights", "have no empty axis", f"shape {list(matrix.shape)}")
    heads = matrix.shape[1]
    if head is None:
        if heads > 1:
            hint = "mosaic draws all heads."
            raise value_error("head", f"be given, from 0 to {heads - 1}", None, hint=hint)
        head = 0
    found = []
    for name, index, count in (("batch", batch, matrix.shape[0]), ("head", head, heads)):
        if not is_integer(index):
            raise type_error(name, "be an int", repr(index))
        if not 0 <= index < count:
            raise value_error(name, f"be from 0 to {count - 1}", index)
        found.append(int(index))
    return found[0], found[1]


def refuse_choice(**named: object) -> None:
    """Raise if something is named that only a lazy matrix has."""
    for name, value in named.items():
        if value not in (None, 0):
            hint = "index an array yourself: weights[batch, head]"
            raise value_error(name, "be left out where weights are written out", value, hint=hint)


def map_of(matrix: Matrix, batch: int, head: int, bins: int) -> Array:
    """One head's map, ``[min(bins, q_len), min(bins, kv_len)]``; see `maps_of`. No other head is computed."""
    return _maps(matrix, batch, range(head, head + 1), bins)[0]


def maps_of(given: Matrix | Sequence[Matrix], batch: object, bins: int) -> Array:
    """Maps of all heads of one layer or of several: the largest weight of each cell, NaN where all of it is hidden.

    Args:
        where: for error messages.
        given: a matrix, or one for each layer, all of one shape.
        batch: which batch item.
        bins: most cells on either side.

    Returns:
        ``[heads, rows, columns]``, or ``[layers, heads, rows, columns]`` of several layers.

    Cost: one sweep over each matrix; O(heads * bins ** 2) memory.
    """
    layers = [given] if isinstance(given, Matrix) else list(given)
    shapes = {matrix.shape for matrix in layers}
    if len(shapes) > 1:
        raise value_error("weights", "all be of one shape", sorted(map(list, shapes)))
    item, _ = chosen(layers[0], batch, 0)
    maps = np.stack([_maps(matrix, item, range(matrix.shape[1]), bins) for matrix in layers])
    return maps[0] if isinstance(given, Matrix) else maps


def places_of(matrix: Matrix, batch: int) -> tuple[Ints, Ints]:
    """Where one item's queries and keys stand: int64 ``[q_len]`` and ``[kv_len]``; -1 where no token stands."""
    _, _, q_len, kv_len = matrix.shape
    q, kv = matrix.positions(range(q_len), (range(kv_len),))
    both = (x.expand(matrix.shape[0], -1, -1, -1)[batch].flatten().cpu().numpy() for x in (q, kv))
    rows, columns = both
    return rows, columns


def _maps(matrix: Matrix, batch: int, heads: range, bins: int) -> Array:
    """The maps of one head or of all, ``[heads, rows, columns]``."""
    return swept(matrix, batch, heads, bins)[0]


def swept(
    matrix: Matrix, batch: int, heads: range, bins: int, folds: Sequence[Fold[Any, Any]] = ()
) -> tuple[Array, tuple[Any, ...]]:
    """The maps of one head or of all, as `maps_of` says, and answers of one batch item, from the same sweep.

    Args:
        matrix: of which neither queries nor keys are none.
        batch: which batch item.
        heads: one, or all.
        bins: most cells on either side.
        folds: questions; their matrix has one batch item, and as many heads as are named.
    """
    outline = Outline.of(matrix)._replace(shape=(1, len(heads), *matrix.shape[2:]))
    is_whole = max(matrix.shape[2:]) <= bins
    fold, seen = Pooled(bins, "sum" if is_whole else "max"), _Seen(outline, bins)
    # Of weights of both signs the one farthest from 0 is drawn; a matrix that fits is drawn as it is.
    is_signed = not is_whole and matrix.hidden == 0 and not isinstance(matrix, AttentionMatrix)
    state, below, states = fold.start(outline), fold.start(outline), [one.start(outline) for one in folds]
    with torch.no_grad(), without_autocast(matrix.device):
        for block in matrix.blocks(batch, heads[0] if len(heads) == 1 else None):
            own = slice(block.heads.start - heads[0], block.heads.stop - heads[0])
            moved = block._replace(batch=slice(0, 1), heads=own)
            state = fold.add(state, moved)
            states = [one.add(old, moved) for one, old in zip(folds, states, strict=True)]
            if is_signed:
                below = fold.add(below, moved._replace(weights=-moved.weights))
            if not isinstance(matrix, AttentionMatrix):
                seen.add_block(matrix, moved, batch)
        if isinstance(matrix, AttentionMatrix):
            seen.add_all(matrix, batch, heads)
    largest = fold.finish(state)[0]
    if is_signed:
        lowest = fold.finish(below)[0]
        largest = torch.where(lowest > largest, -lowest, largest)
    cells = largest.masked_fill(~seen.cells, torch.nan).cpu().numpy()
    answers = tuple(one.finish(old) for one, old in zip(folds, states, strict=True))
    return cells.astype(np.float64 if cells.dtype == np.float64 else np.float32, copy=False), answers


class _Seen:
    """The cells in which a mask allows something, bool ``[heads, rows, columns]``; found without looking at weights.

    Args:
        outline: of the part of a matrix that is drawn.
        bins: most cells on either side.
    """

    def __init__(self, outline: Outline, bins: int):
        _, heads, q_len, kv_len = outline.shape
        rows, columns = min(bins, q_len), min(bins, kv_len)
        self.cells = torch.zeros(heads, rows, columns, dtype=torch.bool, device=outline.device)
        self._row = torch.arange(q_len, device=outline.device) * rows // q_len
        self._column = torch.arange(kv_len, device=outline.device) * columns // kv_len

    def add_all(self, matrix: AttentionMatrix, batch: int, heads: range) -> None:
        """Read the mask's plan: pairs are asked only where it is not sure."""
        given = matrix.inputs.current()
        tells_heads_apart = given.rule.shape[1] > 1 or given.rule.asks_functions
        for head in heads if tells_heads_apart else heads[:1]:
            own = head - heads[0] if tells_heads_apart else slice(None)
            for piece in (piece for tile in given.row_plan.tiles for piece in part_of(tile, batch, head, None)):
                for strip in piece.columns:
                    allowed = tile_scores.allowed(given, piece._replace(columns=(strip,)))
                    self._mark(own, piece.rows, strip.keys, None if allowed is None else allowed[0, 0])

    def add_block(self, matrix: Matrix, block: Block, batch: int) -> None:
        """What can be told from weights: a pair whose weight is exactly 0, in every row, was hidden."""
        if isinstance(matrix, FeatureMatrix | RecurrenceMatrix | StateSpaceMatrix):
            # Their masks do not tell heads apart, and what has decayed to 0 was not hidden.
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
        """Mark the cells of pairs that are allowed, bool ``[rows, keys]``; None for all of them."""
        row, column = self._row[as_slice(rows)], self._column[as_slice(keys)]
        if allowed is None:
            self.cells[heads, row.unique()[:, None], column.unique()] = True
        else:
            i, j = allowed.expand(len(rows), len(keys)).nonzero(as_tuple=True)
            self.cells[heads, row[i], column[j]] = True
