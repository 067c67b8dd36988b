"""Matrices derived from recorded matrices: selected heads, or the concatenated rows of several calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from saccade.engine.positions.positioned_mask import PositionedMask
from saccade.masks import Mask
from saccade.matrix import AttentionMatrix, DerivedMatrix, Matrix, matrix_from_inputs
from saccade.mechanisms.recurrences.recurrence_matrix import RecurrenceMatrix
from saccade.plan import Ranges
from saccade.plan.key_ranges import shift_range
from saccade.statistics import Block
from saccade.support.errors import value_error

CALLED_AS = "record"  # in errors


class DerivedFromCall(DerivedMatrix):
    """Base class of the derived matrices of a recorded call, which have its queries and keys."""

    def over(self, change: Callable[[Matrix], Matrix]) -> Matrix:
        """Return a copy in which ``change`` was applied to each matrix that was built for the call."""
        raise NotImplementedError


def matrix_of_call(matrix: Matrix) -> Matrix:
    """Return the softmax attention inside a `DerivedFromCall` matrix; return any other matrix unchanged."""
    inner = matrix
    while isinstance(inner, DerivedFromCall):
        inner = inner.inner
    return inner if isinstance(inner, AttentionMatrix) else matrix


class ChosenHeads(DerivedFromCall):
    """A view of selected heads of a matrix, in the order of ``heads``, without copies.

    Args:
        matrix: the matrix with all heads.
        heads: indices of the selected heads, from 0.

    Attributes:
        inner: the matrix with all heads.
        heads: indices of the selected heads in ``inner``.

    Example:
        >>> from saccade import AttentionMatrix
        >>> ChosenHeads(AttentionMatrix(torch.zeros(1, 4, 3, 8), torch.zeros(1, 4, 3, 8)), [3, 1]).shape
        (1, 2, 3, 3)
    """

    def __init__(self, matrix: Matrix, heads: Sequence[int]):
        super().__init__(matrix)
        self.heads = tuple(heads)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, _, q_len, kv_len = self.inner.shape
        return (batch, len(self.heads), q_len, kv_len)

    @property
    def kv_heads(self) -> int:
        """The number of selected heads, because a product takes separate values for each selected head."""
        return len(self.heads)

    def over(self, change: Callable[[Matrix], Matrix]) -> Matrix:
        return ChosenHeads(change(self.inner), self.heads)

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        self._check_part(batch, head, rows)
        for index, inner_head in enumerate(self.heads):
            if head is None or head == index:
                for block in self.inner.blocks(batch, inner_head, rows):
                    yield block._replace(heads=slice(index, index + 1))

    def uniform(self) -> Matrix:
        return ChosenHeads(self.inner.uniform(), self.heads)

    def positions(self, rows: range, columns: Ranges) -> tuple[Tensor, Tensor]:
        return self.inner.positions(rows, columns)


class JoinedMatrices(DerivedMatrix):
    """The concatenated rows of several calls, such as a prompt and then one row per decoded token.

    Args:
        matrices: the matrices of the calls, in order, with equal batches and heads.
        first_columns: index of the first key of each call among the keys of all calls.

    Example:
        >>> from saccade import AttentionMatrix, masks
        >>> x = torch.randn(1, 1, 5, 8)
        >>> prompt = AttentionMatrix(x[:, :, :4], x[:, :, :4], masks.Causal())
        >>> step = AttentionMatrix(x[:, :, 4:], x, masks.Causal())
        >>> whole = AttentionMatrix(x, x, masks.Causal())
        >>> torch.allclose(JoinedMatrices([prompt, step], [0, 0]).to_dense(), whole.to_dense())
        True
    """

    def __init__(self, matrices: Sequence[Matrix], first_columns: Sequence[int]):
        super().__init__(matrices[0])
        self._parts = tuple(zip(matrices, first_columns, strict=True))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, _, _ = self.inner.shape
        q_len = sum(matrix.shape[2] for matrix, _ in self._parts)
        return (batch, heads, q_len, max(first + matrix.shape[3] for matrix, first in self._parts))

    @property
    def is_stochastic(self) -> bool:
        return all(matrix.is_stochastic for matrix, _ in self._parts)

    def uniform(self) -> Matrix:
        matrices, first_columns = zip(*self._parts, strict=True)
        return JoinedMatrices([matrix.uniform() for matrix in matrices], first_columns)

    def positions(self, rows: range, columns: Ranges) -> tuple[Tensor, Tensor]:
        kv_len = self.shape[3]
        q_parts = []
        kv = torch.full((1, kv_len), -1, dtype=torch.int64, device=self.device)
        for matrix, first in self._parts:
            own_q, own_kv = matrix.positions(range(matrix.shape[2]), (range(matrix.shape[3]),))
            own_q, own_kv = own_q[:, 0, :, 0], own_kv[:, 0, 0]
            # If positions are unknown, the keys of a call are numbered from 0.
            moved = first if first and not bool(own_kv[:, 0].any()) else 0
            q_parts.append(own_q + moved)
            kv = kv.expand(max(len(kv), len(own_kv)), -1).clone()
            kv[:, first : first + matrix.shape[3]] = own_kv + moved
        items = max(map(len, q_parts))
        q = torch.cat([part.expand(items, -1) for part in q_parts], 1)
        keys = torch.cat([torch.arange(span.start, span.stop, span.step, device=self.device) for span in columns])
        return q[:, None, rows.start : rows.stop : rows.step, None], kv[:, None, None, keys]

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        self._check_part(batch, head, rows)
        start = 0
        for matrix, first in self._parts:
            q_len = matrix.shape[2]
            part_rows = (
                range(q_len) if rows is None else range(max(rows.start - start, 0), min(rows.stop - start, q_len))
            )
            if len(part_rows):
                for block in matrix.blocks(batch, head, part_rows):
                    yield block._replace(
                        rows=shift_range(block.rows, start),
                        columns=tuple(shift_range(span, first) for span in block.columns),
                    )
            start += q_len


def chosen_heads(matrix: Matrix, heads: Sequence[int]) -> Matrix:
    """Return a matrix with only the selected heads of a matrix, in the order of ``heads``.

    Args:
        matrix: the matrix with all heads.
        heads: indices of the selected heads, from 0.

    Raises:
        ValueError: a head does not exist.

    Cost: for softmax attention and recurrences, the queries and keys of these heads are copied. For any other matrix
    nothing is copied, and heads are computed one at a time.
    """
    num_heads = matrix.shape[1]
    if not all(0 <= head < num_heads for head in heads):
        raise value_error("heads", f"be from 0 to {num_heads - 1}", list(heads))
    if isinstance(matrix, RecurrenceMatrix):
        return matrix.of_heads(heads)
    if not isinstance(matrix, AttentionMatrix):
        return ChosenHeads(matrix, heads)
    inputs = matrix.inputs
    if inputs.tile_function is not None or inputs.modification is not None:
        return ChosenHeads(matrix, heads)
    index = list(heads)
    bias, rule, share = inputs.bias, inputs.rule, num_heads // inputs.key.shape[1]
    if bias is not None and bias.source.shape[1] > 1:
        bias = bias.of(bias.source[:, index])
    if rule.shape[1] > 1 or rule.calls_functions:  # a function may depend on the head, whatever the shape
        if isinstance(rule, PositionedMask):  # only its inner mask is replaced
            rule = dataclasses.replace(rule, mask=_MaskOfHeads(rule.mask, tuple(index)))
        else:
            rule = _MaskOfHeads(rule, tuple(index))
    selected = inputs.replaced(
        shape=(inputs.shape[0], len(index), *inputs.shape[2:]),
        query=inputs.query[:, index],
        key=inputs.key[:, [head // share for head in index]],
        sink_logit=None if inputs.sink_logit is None else inputs.sink_logit[index],
        bias=bias,
        rule=rule,
    )
    return matrix_from_inputs(selected, matrix.impl)


@dataclasses.dataclass(frozen=True)
class _MaskOfHeads(Mask):
    """Selected heads of a mask that differs between heads."""

    mask: Mask
    heads: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return (self.mask.shape[0], len(self.heads))

    @property
    def made_of(self) -> tuple[Mask, ...]:
        return (self.mask,)

    def allows(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return self.mask.allows(b, torch.tensor(self.heads, device=h.device)[h], q, kv)
