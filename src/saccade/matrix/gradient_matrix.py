"""GradientMatrix: the gradient of a loss with respect to attention weights, as a lazy matrix."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from saccade.engine.tiles.grouped_heads import at, groups_of, product, take
from saccade.matrix.algebra import check_alike, check_weights
from saccade.matrix.matrix import DerivedMatrix, Matrix
from saccade.plan import Ranges
from saccade.statistics.gradient_products import product_blocks
from saccade.statistics.row_block import Block, row_blocks
from saccade.support.numerics import wide_dtype
from saccade.support.torch_modes import without_autocast


class GradientMatrix(Matrix):
    r"""The gradient of a loss with respect to attention weights, ``grad_out @ value.mT``, which is never materialised.

    .. math:: O = A V \quad\Rightarrow\quad \frac{\partial L}{\partial A} = \frac{\partial L}{\partial O} V^\top

    Masked pairs have entries as well: their weights are 0, but changing them would change the output.

    Args:
        grad_out: the gradient with respect to the output, ``[batch, heads, q_len, value_dim]``.
        value: ``[batch, kv_heads, kv_len, value_dim]``, with the dtype and device of ``grad_out``.

    Cost: O(length · width) memory. Products take linear time, statistics O(q_len · kv_len · value_dim).

    Example:
        >>> GradientMatrix(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 4, 3)).to_dense()[0, 0, 0]
        tensor([3., 3., 3., 3.])
    """

    def __init__(self, grad_out: Tensor, value: Tensor):
        self.grad_out, self.value = grad_out, value

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, q_len, _ = self.grad_out.shape
        return (batch, heads, q_len, self.value.shape[2])

    @property
    def dtype(self) -> torch.dtype:
        return self.grad_out.dtype

    @property
    def device(self) -> torch.device:
        return self.grad_out.device

    @property
    def kv_heads(self) -> int:
        return self.value.shape[1]

    @property
    def is_stochastic(self) -> bool:
        return False

    def matmul(self, value: Tensor, *, dropout_p: float = 0.0, seed: int | None = None) -> Tensor:
        if dropout_p:
            return super().matmul(value, dropout_p=dropout_p, seed=seed)
        value = self._operand(value, "value", self.kv_heads, self.shape[3])
        wide = wide_dtype(self.dtype)
        with without_autocast(self.device):
            small = self.value.to(wide).mT @ value.to(wide)
            return product(self.grad_out.to(wide), small).to(value.dtype)

    def rmatmul(self, x: Tensor) -> Tensor:
        x = self._operand(x, "x", self.shape[1], self.shape[2])
        wide = wide_dtype(self.dtype)
        with without_autocast(self.device):
            small = (self.grad_out.to(wide).mT @ x.to(wide)).unflatten(1, (self.kv_heads, -1))
            return (self.value.to(wide)[:, :, None] @ small).flatten(1, 2).to(x.dtype)

    def entries(self, block: Block) -> Tensor:
        heads, groups = range(self.shape[1])[block.heads], self.kv_heads
        share = self.shape[1] // max(groups, 1)
        if len(heads) > 1 and (heads.start % share or heads.stop % share):  # not full groups of heads
            parts = [self.entries(block._replace(heads=slice(head, head + 1))) for head in heads]
            return torch.cat(parts, 1)
        wide = wide_dtype(self.dtype)
        rows = at(self.grad_out[block.batch, block.heads], block.rows, 2).to(wide)
        value = take(self.value[block.batch, groups_of(block.heads, self.shape[1], groups)], block.columns, 2)
        with without_autocast(self.device):
            return product(rows, value.to(wide).mT)

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        self._check_part(batch, head, rows)
        return row_blocks(self.shape, self._rows_of, batch, head, rows)

    def _rows_of(self, batch: int, head: int, rows: range) -> Tensor:
        columns = (range(self.shape[3]),)
        return self.entries(Block(slice(batch, batch + 1), slice(head, head + 1), rows, columns, self.grad_out))[0, 0]


class ElementwiseProduct(DerivedMatrix):
    """The elementwise product of two matrices of the same shape, such as attention times gradient; also ``A * G``.

    Args:
        first, second: the matrices. The second is not computed for pairs that are masked in the first.
        keep_positive: whether negative entries of the product become 0, as in Chefer's relevance maps.

    Raises:
        ValueError: the matrices have different shapes, dtypes or devices.
        UnsupportedError: a matrix contains scores.

    Cost: statistics read blocks of both matrices, a megabyte at a time.

    Example:
        >>> from saccade import AttentionMatrix
        >>> x = torch.zeros(1, 1, 2, 4)
        >>> (AttentionMatrix(x, x) * GradientMatrix(x + 1, x + 1))[0, 0, 0]
        tensor([2., 2.])

    Reference: Chefer et al. 2021, arXiv:2103.15679, equation 5.
    """

    def __init__(self, first: Matrix, second: Matrix, *, keep_positive: bool = False):
        for matrix in (first, second):
            check_weights(matrix)
        check_alike(first, second, tuple(first.shape), "*")
        super().__init__(first)
        self.second, self.keep_positive = second, keep_positive

    @property
    def is_stochastic(self) -> bool:
        return False

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        self._check_part(batch, head, rows)
        keep = self.keep_positive
        return product_blocks(self.inner, self.second, keep_positive=keep, batch=batch, head=head, rows=rows)

    def positions(self, rows: range, columns: Ranges) -> tuple[Tensor, Tensor]:
        return self.inner.positions(rows, columns)

    def __repr__(self) -> str:
        return f"{self.inner} * {self.second}"
