"""Parts of a matrix by index, ``A[batch, head, rows, columns]``, computed from the rows that they need."""

from __future__ import annotations

import math
from types import EllipsisType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from saccade.statistics.sparse import DENSE_LIMIT
from saccade.support.errors import kind, type_error, value_error
from saccade.support.numerics import wide_dtype
from saccade.support.validation import is_integer

if TYPE_CHECKING:
    from saccade.matrix.matrix import Matrix

Index = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]
"""An index: whole numbers, slices and one ``...``, for batch, head, query and key."""

_FAR = 16  # rows from one that is asked for to the next: closer ones take less time with those between them
_AXES = ("batch", "head", "query", "key")


def part_of(matrix: Matrix, index: object) -> Tensor:
    """``matrix.to_dense()[index]``, without the rest of the matrix.

    Args:
        matrix: any.
        index: see `Index`.

    Raises:
        TypeError: something else between the brackets.
        IndexError: a whole number out of range, or more than four of them.
        ValueError: a part of more than `DENSE_LIMIT` weights.
    """
    asked = _four(index)
    spans = [_span(own, axis, matrix.shape[axis]) for axis, own in enumerate(asked)]
    size = math.prod(map(len, spans))
    if size > DENSE_LIMIT:
        hint = "A[b, h, i] gives a row, A[b, h, i:j] some; A.pooled(bins) a map of all"
        raise value_error("a part by index", f"be at most {DENSE_LIMIT:,} weights", f"{size:,}", hint=hint)
    batch, heads, rows, columns = spans
    out = torch.full([len(span) for span in spans], matrix.hidden, dtype=wide_dtype(matrix.dtype), device=matrix.device)
    if size:
        together = [rows] if abs(rows.step) < _FAR else [range(row, row + 1) for row in rows]
        for b in (None,) if batch == range(matrix.shape[0]) else batch:
            for h in (None,) if heads == range(matrix.shape[1]) else heads:
                for some in together:
                    _fill(out, matrix, (b, h, range(min(some), max(some) + 1)), (batch, heads, rows, columns))
    return out[tuple(0 if is_integer(own) else slice(None) for own in asked)]


def _fill(
    out: Tensor, matrix: Matrix, where: tuple[int | None, int | None, range], spans: tuple[range, range, range, range]
) -> None:
    batch, heads, rows, columns = spans
    for block in matrix.blocks(*where):
        items = block.batch if where[0] is None else _one(batch.index(where[0]))
        own_heads = block.heads if where[1] is None else _one(heads.index(where[1]))
        from_rows, to_rows = _common(block.rows, rows)
        if not len(to_rows):
            continue
        for span, weights in block.by_range(block.weights):
            from_columns, to_columns = _common(span, columns)
            part = weights[:, :, from_rows.to(weights.device)][..., from_columns.to(weights.device)]
            out[items, own_heads, to_rows[:, None], to_columns] = part


def _four(index: object) -> tuple[int | slice, int | slice, int | slice, int | slice]:
    given = index if isinstance(index, tuple) else (index,)
    for own in given:
        if not (is_integer(own) or isinstance(own, slice) or own is ...):
            hint = "A[b, h], A[b, h, i], A[b, h, i:j], A[..., i, j]; A.to_dense() gives a tensor, which takes any index"
            got = f"{own}" if isinstance(own, bool) or own is None else kind(own)
            raise type_error("index", "be made of whole numbers, slices and ...", got, hint=hint)
    dots = sum(own is ... for own in given)
    if len(given) - dots > len(_AXES) or dots > 1:
        raise IndexError(f"Matrix: index must name at most {', '.join(_AXES)}, with one ...; got {len(given)} parts.")
    at = given.index(...) if dots else len(given)
    missing = (slice(None),) * (len(_AXES) - len(given) + dots)
    return (*given[:at], *missing, *given[at + dots :])


def _span(own: int | slice, axis: int, size: int) -> range:
    """Return the indices along an axis."""
    if isinstance(own, slice):
        for edge in (own.start, own.stop, own.step):
            if edge is not None and not is_integer(edge):
                raise type_error("edges of a slice", "be whole numbers", kind(edge))
        if own.step == 0:
            raise value_error("step of a slice", "not be 0", 0)
        return range(*own.indices(size))
    if not -size <= own < size:
        raise IndexError(f"Matrix: {_AXES[axis]} index must be in [{-size}, {size}); got {own}.")
    return range(own % size, own % size + 1)


def _one(place: int) -> slice:
    return slice(place, place + 1)


def _common(own: range, wanted: range) -> tuple[Tensor, Tensor]:
    """Places of what two ranges share, in the one and in the other."""
    indices = torch.arange(own.start, own.stop, own.step, device="cpu")
    steps = (indices - wanted.start).div(wanted.step, rounding_mode="floor")
    is_shared = (steps * wanted.step + wanted.start == indices) & (steps >= 0) & (steps < len(wanted))
    return is_shared.nonzero()[:, 0], steps[is_shared]
