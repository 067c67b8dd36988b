"""Indexing of lazy matrices, ``A[batch, head, rows, columns]``, and conversion to a sparse tensor."""

from __future__ import annotations

import math
from types import EllipsisType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from saccade.statistics.statistic import DENSE_LIMIT, MatrixInfo, MatrixLike
from saccade.support.errors import kind, type_error, value_error
from saccade.support.numerics import wide_dtype
from saccade.support.validation import check_int, is_integer

if TYPE_CHECKING:
    from saccade.matrix.matrix import Matrix

SPARSE_LIMIT = 1 << 24
"""Default limit of `Matrix.to_sparse`: 16 million weights, 600 MB in float32."""


def sparse_of(matrix: MatrixLike, limit: int) -> Tensor:
    """Return the nonzero weights of a matrix as a sparse tensor; see `saccade.Matrix.to_sparse`."""
    check_int("limit", limit, None)
    dtype = MatrixInfo.of(matrix).dtype
    indices = [torch.zeros(4, 0, dtype=torch.int64, device=matrix.device)]
    values = [torch.zeros(0, dtype=dtype, device=matrix.device)]
    count = 0
    with torch.no_grad():
        for block in matrix.blocks():
            nonzero = block.weights.nonzero(as_tuple=True)
            count += len(nonzero[0])
            if count > limit:
                hint = "A[b, h, i] gives a row, A.topk(k) the strongest keys; to_sparse(limit=...) raises the limit"
                raise value_error("size", f"be at most {limit:,} weights", "more", hint=hint)
            item, head, row, column = nonzero
            offsets = torch.tensor([block.batch.start, block.heads.start], device=matrix.device)
            indices.append(torch.stack([item + offsets[0], head + offsets[1], block.queries[row], block.keys[column]]))
            values.append(block.weights[nonzero].to(dtype))
    together = torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), matrix.shape, check_invariants=False)
    return together.coalesce()


Index = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]
"""An index into a matrix: integers, slices and at most one ``...``, for batch, head, query and key."""

_FAR = 16  # smallest step for which rows are computed one by one; with smaller steps, rows in between are computed too
_AXES = ("batch", "head", "query", "key")


def part_of(matrix: Matrix, index: object) -> Tensor:
    """Return ``matrix.to_dense()[index]`` without computing the other parts of the matrix.

    Args:
        matrix: any matrix.
        index: see `Index`.

    Raises:
        TypeError: an index has an unsupported type.
        IndexError: an integer is out of range, or there are more than four indices.
        ValueError: the part has more than `DENSE_LIMIT` weights.
    """
    indices = _four_indices(index)
    spans = [_span(part, axis, matrix.shape[axis]) for axis, part in enumerate(indices)]
    size = math.prod(map(len, spans))
    if size > DENSE_LIMIT:
        hint = "A[b, h, i] gives a row, A[b, h, i:j] several, A.pooled(bins) a map of all"
        raise value_error("a part by index", f"be at most {DENSE_LIMIT:,} weights", f"{size:,}", hint=hint)
    batch, heads, rows, columns = spans
    out = torch.full([len(span) for span in spans], matrix.hidden, dtype=wide_dtype(matrix.dtype), device=matrix.device)
    if size:
        together = [rows] if abs(rows.step) < _FAR else [range(row, row + 1) for row in rows]
        for b in (None,) if batch == range(matrix.shape[0]) else batch:
            for h in (None,) if heads == range(matrix.shape[1]) else heads:
                for some in together:
                    _fill_part(out, matrix, (b, h, range(min(some), max(some) + 1)), (batch, heads, rows, columns))
    return out[tuple(0 if is_integer(part) else slice(None) for part in indices)]


def _fill_part(
    out: Tensor, matrix: Matrix, where: tuple[int | None, int | None, range], spans: tuple[range, range, range, range]
) -> None:
    batch, heads, rows, columns = spans
    for block in matrix.blocks(*where):
        items = block.batch if where[0] is None else _slice_of_one(batch.index(where[0]))
        own_heads = block.heads if where[1] is None else _slice_of_one(heads.index(where[1]))
        from_rows, to_rows = _shared_indices(block.rows, rows)
        if not len(to_rows):
            continue
        for span, weights in block.by_range(block.weights):
            from_columns, to_columns = _shared_indices(span, columns)
            part = weights[:, :, from_rows.to(weights.device)][..., from_columns.to(weights.device)]
            out[items, own_heads, to_rows[:, None], to_columns] = part


def _four_indices(index: object) -> tuple[int | slice, int | slice, int | slice, int | slice]:
    parts = index if isinstance(index, tuple) else (index,)
    for part in parts:
        if not (is_integer(part) or isinstance(part, slice) or part is ...):
            hint = "A[b, h], A[b, h, i], A[b, h, i:j], A[..., i, j]; A.to_dense() gives a tensor, which takes any index"
            got = f"{part}" if isinstance(part, bool) or part is None else kind(part)
            raise type_error("index", "consist of whole numbers, slices and ...", got, hint=hint)
    dots = sum(part is ... for part in parts)
    if len(parts) - dots > len(_AXES) or dots > 1:
        raise IndexError(f"Matrix: index must name at most {', '.join(_AXES)}, with one ...; got {len(parts)} parts.")
    at = parts.index(...) if dots else len(parts)
    missing = (slice(None),) * (len(_AXES) - len(parts) + dots)
    return (*parts[:at], *missing, *parts[at + dots :])


def _span(part: int | slice, axis: int, size: int) -> range:
    """Convert one element of a matrix index, an int or a slice, to the range that it selects along its axis."""
    if isinstance(part, slice):
        for edge in (part.start, part.stop, part.step):
            if edge is not None and not is_integer(edge):
                raise type_error("edges of a slice", "be whole numbers", kind(edge))
        if part.step == 0:
            raise value_error("step of a slice", "not be 0", 0)
        return range(*part.indices(size))
    if not -size <= part < size:
        raise IndexError(f"Matrix: {_AXES[axis]} index must be in [{-size}, {size}); got {part}.")
    return range(part % size, part % size + 1)


def _slice_of_one(place: int) -> slice:
    return slice(place, place + 1)


def _shared_indices(first: range, second: range) -> tuple[Tensor, Tensor]:
    """Return where two ranges have indices in common: the offsets of these indices in the first and second range."""
    indices = torch.arange(first.start, first.stop, first.step, device="cpu")
    steps = (indices - second.start).div(second.step, rounding_mode="floor")
    is_shared = (steps * second.step + second.start == indices) & (steps >= 0) & (steps < len(second))
    return is_shared.nonzero()[:, 0], steps[is_shared]
