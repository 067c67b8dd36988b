"""Sums and products of lazy matrices, which are lazy matrices themselves."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from saccade.matrix.matrix import DerivedMatrix, Matrix
from saccade.plan import Ranges
from saccade.statistics.row_block import Block, as_slice, row_blocks
from saccade.support.errors import kind, type_error, unsupported, value_error
from saccade.support.validation import is_number


class ByRows(DerivedMatrix):
    """Base class of matrices that are computed a few complete rows at a time, for one head of one batch item."""

    def rows_of(self, batch: int, head: int, rows: range) -> Tensor:
        """Return the given rows of one head of the sum or product, ``[rows, kv_len]`` in float32 or wider."""
        raise NotImplementedError

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        self._check_part(batch, head, rows)
        return row_blocks(self.shape, self.rows_of, batch, head, rows)

    def positions(self, rows: range, columns: Ranges) -> tuple[Tensor, Tensor]:
        return self.inner.positions(rows, columns)


class Sum(ByRows):
    """A weighted sum of matrices, ``c1 * A1 + c2 * A2 + …``. Each matrix uses the kernel that suits it best.

    In general, rows are not distributions. Differential attention is ``(A1 - c * A2) @ value``.

    Args:
        terms: pairs of a factor and a matrix. All matrices have the same shape, dtype and device. A factor is a number
            or a tensor: ``[heads, 1, 1]``, with one number per head, or ``[batch, heads, q_len, 1]``, one per row.

    Cost: a product costs one product for each matrix. Statistics read rows of all matrices, a megabyte at a time.

    Example:
        >>> from saccade import AttentionMatrix
        >>> x = torch.zeros(1, 1, 2, 4)
        >>> A = AttentionMatrix(x, x)
        >>> (A - 0.5 * A)[0, 0]
        tensor([[0.2500, 0.2500],
                [0.2500, 0.2500]])
    """

    def __init__(self, *terms: tuple[float | Tensor, Matrix]):
        self.terms: tuple[tuple[float | Tensor, Matrix], ...] = ()
        for coefficient, matrix in terms:
            check_weights(matrix)
            factor = _factor(coefficient, matrix)
            inner = matrix.terms if isinstance(matrix, Sum) else ((1.0, matrix),)
            self.terms += tuple((factor * inner_factor, each) for inner_factor, each in inner)
        super().__init__(self.terms[0][1])
        for _, other in self.terms[1:]:
            check_alike(self.inner, other, self.shape, "+")

    @property
    def is_stochastic(self) -> bool:
        return False

    @property
    def kv_heads(self) -> int:
        """Number of value heads that all matrices of the sum accept."""
        counts = {matrix.kv_heads for _, matrix in self.terms}
        return counts.pop() if len(counts) == 1 else self.shape[1]

    def matmul(self, value: Tensor, *, dropout_p: float = 0.0, seed: int | None = None) -> Tensor:
        if dropout_p:
            return super().matmul(value, dropout_p=dropout_p, seed=seed)
        value = self._operand(value, "value", self.kv_heads, self.shape[3])
        parts = (_each_head(matrix, value) * factor for factor, matrix in self.terms)
        return functools.reduce(torch.add, parts).to(value.dtype)

    def rmatmul(self, x: Tensor) -> Tensor:
        x = self._operand(x, "x", self.shape[1], self.shape[2])
        parts = []
        for factor, matrix in self.terms:
            is_by_row = isinstance(factor, Tensor) and factor.dim() == 4
            parts.append(matrix.rmatmul((x * factor).to(x.dtype)) if is_by_row else matrix.rmatmul(x) * factor)
        return functools.reduce(torch.add, parts).to(x.dtype)

    def rows_of(self, batch: int, head: int, rows: range) -> Tensor:
        parts = []
        for factor, matrix in self.terms:
            parts.append(matrix[batch, head, as_slice(rows)] * _part_of_factor(factor, batch, head, rows))
        return functools.reduce(torch.add, parts)

    def __repr__(self) -> str:
        factors = (f"{factor:.4g}" if isinstance(factor, float) else "tensor" for factor, _ in self.terms)
        return " + ".join(f"{text} * {matrix}" for text, (_, matrix) in zip(factors, self.terms, strict=True))


class Chain(ByRows):
    """The product of two matrices, ``A1 @ A2``: attention through two layers.

    Args:
        first: ``[batch, heads, q_len, m]``.
        second: ``[batch, heads, m, kv_len]``.

    Cost: a product with values costs one product with each matrix. Statistics read the whole second matrix
    again for each megabyte of rows.

    Example:
        >>> from saccade import AttentionMatrix, masks
        >>> x = torch.zeros(1, 1, 3, 4)
        >>> A = AttentionMatrix(x, x, masks.Causal())
        >>> (A @ A)[0, 0, 1]
        tensor([0.7500, 0.2500, 0.0000])
    """

    def __init__(self, first: Matrix, second: Matrix):
        for matrix in (first, second):
            check_weights(matrix)
        batch, heads, _, length = first.shape
        check_alike(first, second, (batch, heads, length, second.shape[3]), "@")
        super().__init__(first)
        self.second = second

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (*self.inner.shape[:3], self.second.shape[3])

    @property
    def kv_heads(self) -> int:
        return self.second.kv_heads

    @property
    def is_stochastic(self) -> bool:
        return self.inner.is_stochastic and self.second.is_stochastic

    def matmul(self, value: Tensor, *, dropout_p: float = 0.0, seed: int | None = None) -> Tensor:
        if dropout_p:
            return super().matmul(value, dropout_p=dropout_p, seed=seed)
        return _each_head(self.inner, self.second.matmul(value))

    def rmatmul(self, x: Tensor) -> Tensor:
        return self.second.rmatmul(self.inner.rmatmul(x))

    def rows_of(self, batch: int, head: int, rows: range) -> Tensor:
        left = self.inner[batch, head, as_slice(rows)]
        out = left.new_zeros(len(rows), self.shape[3])
        for block in self.second.blocks(batch, head):
            part = left[:, as_slice(block.rows)] @ block.weights[0, 0].to(left.dtype)
            for span, columns in block.by_range(part):
                out[:, as_slice(span)] += columns
        return out

    def positions(self, rows: range, columns: Ranges) -> tuple[Tensor, Tensor]:
        q, _ = self.inner.positions(rows, (range(1),))
        _, kv = self.second.positions(range(1), columns)
        return q, kv

    def __repr__(self) -> str:
        return f"{self.inner} @ {self.second}"


def _each_head(matrix: Matrix, value: Tensor) -> Tensor:
    """Return ``matrix @ value``, even if ``value`` has more or fewer heads than the matrix has key heads."""
    groups, value_heads = matrix.kv_heads, value.shape[1]
    if value_heads == groups:
        return matrix.matmul(value)
    if groups % value_heads == 0:
        return matrix.matmul(value.repeat_interleave(groups // value_heads, 1))
    # Heads of one group have different values: concatenate them, and select each head's part of the result.
    batch, heads, q_len, _ = matrix.shape
    share, width = heads // groups, value.shape[3]
    per_head = value.repeat_interleave(heads // value_heads, 1)
    wide = per_head.unflatten(1, (groups, share)).permute(0, 1, 3, 2, 4).flatten(3)
    out = matrix.matmul(wide).unflatten(3, (share, width)).unflatten(1, (groups, share))
    which = torch.arange(share, device=value.device)
    picked = out[:, :, which, :, which].permute(1, 2, 0, 3, 4)
    return picked.reshape(batch, heads, q_len, width)


def check_weights(matrix: Matrix) -> None:
    """Raise an error for score matrices. Their sums and products are meaningless, because masked pairs are -inf."""
    if matrix.hidden:
        reason = f"masked pairs of a score matrix are {matrix.hidden}, not 0"
        raise unsupported("a sum or a product", [reason], hint="A.scores.to_dense() is a tensor")


def check_alike(first: Matrix, other: Matrix, shape: tuple[int, ...], sign: str) -> None:
    """Raise an error unless two lazy matrices have matching shapes, dtypes and devices."""
    facts = [f"{matrix!r}" for matrix in (first, other)]
    if tuple(other.shape) != tuple(shape):
        rule = f"have shape {list(shape)} to be the right operand of {sign}"
        raise value_error("the other matrix", rule, list(other.shape), facts=facts)
    if (first.dtype, first.device) != (other.dtype, other.device):
        rule = f"be {first.dtype} on {first.device}, like the first"
        hint = "A.to(device, dtype) moves a matrix"
        raise value_error("the other matrix", rule, f"{other.dtype} on {other.device}", facts=facts, hint=hint)


def _part_of_factor(factor: float | Tensor, batch: int, head: int, rows: range) -> float | Tensor:
    """Return the part of a sum's factor that applies to some rows of one head."""
    if not isinstance(factor, Tensor) or factor.dim() == 0:
        return factor
    return factor[head, 0, 0] if factor.dim() == 3 else factor[batch, head, as_slice(rows)]


def _factor(factor: object, matrix: Matrix) -> float | Tensor:
    """Check the factor of a matrix in a sum, and return it as a number or a tensor that broadcasts to the matrix."""
    if is_number(factor):
        return float(factor)
    batch, heads, q_len, _ = matrix.shape
    if isinstance(factor, Tensor) and factor.numel() == 1:
        return factor.reshape(())
    if isinstance(factor, Tensor) and factor.shape in ((heads, 1, 1), (1, heads, 1, 1)):
        return factor.reshape(heads, 1, 1)
    if isinstance(factor, Tensor) and factor.shape == (batch, heads, q_len, 1):
        return factor
    got = f"a tensor {list(factor.shape)}" if isinstance(factor, Tensor) else kind(factor)
    hint = "to change individual weights, use A.to_dense() * x; to scale keys, A @ (x * value)"
    shapes = f"[{heads}, 1, 1] or [{batch}, {heads}, {q_len}, 1], one for each head or row"
    raise type_error("a factor", f"be a number, or a tensor {shapes}", got, hint=hint)
