"""EditedMatrix: an attention matrix with replaced heads and changed head outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.matrix import Matrix
from saccade.matrix.algebra import ByRows
from saccade.recording.derived_matrices import DerivedFromCall, chosen_heads

ChangeOutput = Callable[[Tensor], Tensor]
"""A function that returns a changed copy of a call's output, ``[batch, heads, q_len, value_dim]``."""


class ReplacedHeads(NamedTuple):
    """Heads to replace, and the matrix whose heads replace them.

    Attributes:
        heads: indices of the heads.
        matrix: a matrix with all heads of the call, of which only those in ``heads`` are used.
        is_of_call: whether the matrix was built from the queries and keys of the call.
    """

    heads: tuple[int, ...]
    matrix: Matrix
    is_of_call: bool = False


class EditedMatrix(ByRows, DerivedFromCall):
    """An attention matrix in which some heads are replaced by the same heads of other matrices.

    Args:
        inner: the matrix that supplies the heads that are not replaced.
        parts: the replaced heads and their matrices; if several parts replace a head, the last part applies.
        changes: functions that change the product with values, applied in order; the matrix itself stays unchanged.

    Cost: multiplying values takes one product with ``inner``, unless all heads are replaced, and one product with the
    replaced heads of each part.
    """

    def __init__(self, inner: Matrix, parts: Sequence[ReplacedHeads], changes: Sequence[ChangeOutput] = ()):
        super().__init__(inner)
        self.parts, self.changes = tuple(parts), tuple(changes)
        self._source = {head: part.matrix for part in self.parts for head in part.heads}

    @property
    def is_stochastic(self) -> bool:
        return all(matrix.is_stochastic for matrix in (self.inner, *self._source.values()))

    def over(self, change: Callable[[Matrix], Matrix]) -> Matrix:
        parts = [part._replace(matrix=change(part.matrix)) if part.is_of_call else part for part in self.parts]
        return EditedMatrix(change(self.inner), parts, self.changes)

    def matmul(self, value: Tensor, *, dropout_p: float = 0.0, seed: int | None = None) -> Tensor:
        value = self._operand(value, "value", self.kv_heads, self.shape[3])
        share = self.shape[1] // self.kv_heads
        out: Tensor | None = None
        if len(self._source) < self.shape[1]:
            out = self.inner.matmul(value, dropout_p=dropout_p, seed=seed)
        for part in self.parts:
            values = value[:, [head // share for head in part.heads]]
            rows = _product(chosen_heads(part.matrix, part.heads), values, dropout_p, seed)
            out = rows.new_zeros(*self.shape[:3], value.shape[3]) if out is None else out
            out = out.index_copy(1, torch.tensor(part.heads, device=out.device), rows.to(out.dtype))
        assert out is not None  # each head comes from the inner matrix or from a part
        for change in self.changes:
            out = change(out)
        return out

    def rows_of(self, batch: int, head: int, rows: range) -> Tensor:
        matrix = self._source.get(head, self.inner)
        return matrix[min(batch, matrix.shape[0] - 1), head, rows.start : rows.stop]


def _product(matrix: Matrix, value: Tensor, dropout_p: float, seed: int | None) -> Tensor:
    """Multiply a matrix by values ``[batch, heads, kv_len, value_dim]``; broadcast a matrix with one batch item."""
    batch, width = len(value), value.shape[3]
    if matrix.shape[0] == batch:
        return matrix.matmul(value, dropout_p=dropout_p, seed=seed)
    wide = value.permute(1, 2, 0, 3).flatten(2)[None]
    return matrix.matmul(wide, dropout_p=dropout_p, seed=seed)[0].unflatten(2, (batch, width)).permute(2, 0, 1, 3)
