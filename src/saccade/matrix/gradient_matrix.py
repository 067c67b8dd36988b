"""GradientMatrix: the gradient of a loss by attention weights, as a lazy matrix."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from saccade.engine.tiles.grouped_heads import groups_of, product
from saccade.matrix.algebra import ByRows, check_alike
from saccade.matrix.matrix import Matrix
from saccade.statistics.row_block import Block, as_slice
from saccade.support.numerics import wide_dtype
from saccade.support.torch_modes import without_autocast

_ENTRIES = 1 << 18  # number of entries of a block: a megabyte


class GradientMatrix(Matrix):
    r"""The gradient of a loss by the weights of an attention call, ``grad_out @ value.mT``, which is never stored.

    .. math:: O = A V \quad\Rightarrow\quad \frac{\partial L}{\partial A} = \frac{\partial L}{\partial O} V^\top

    Masked pairs have entries too, since their weights, which are 0, would change the output as any others.

    Args:
        grad_out: the gradient by the output, ``[batch, heads, q_len, value_dim]``.
        value: ``[batch, kv_heads, kv_len, value_dim]``, like ``grad_out`` in dtype and device.

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

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        self._check_part(batch, head, rows)
        return self._blocks(batch, head, rows)

    def _blocks(self, batch: int | None, head: int | None, rows: range | None) -> Iterator[Block]:
        items, heads, q_len, kv_len = self.shape
        rows = range(q_len) if rows is None else range(q_len)[as_slice(rows)]
        step, wide = max(1, _ENTRIES // max(kv_len, 1)), wide_dtype(self.dtype)
        for b in range(items) if batch is None else (batch,):
            for h in range(heads) if head is None else (head,):
                own = slice(h, h + 1)
                value = self.value[b : b + 1, groups_of(own, heads, self.kv_heads)].to(wide)
                for start in range(rows.start, rows.stop, step):
                    some = range(start, min(start + step, rows.stop))
                    with without_autocast(self.device):
                        weights = product(self.grad_out[b : b + 1, own, as_slice(some)].to(wide), value.mT)
                    yield Block(slice(b, b + 1), own, some, (range(kv_len),), weights)


class ElementwiseProduct(ByRows):
    """The elementwise product of two matrices of the same shape, such as attention times gradient.

    Args:
        first, second: the matrices.
        keep_positive: whether negative entries of the product become 0, as in Chefer's relevance maps.

    Cost: statistics read rows of both matrices, a megabyte at a time.

    Example:
        >>> from saccade import AttentionMatrix
        >>> x = torch.zeros(1, 1, 2, 4)
        >>> ElementwiseProduct(AttentionMatrix(x, x), GradientMatrix(x + 1, x + 1))[0, 0, 0]
        tensor([2., 2.])

    Reference: Chefer et al. 2021, arXiv:2103.15679, equation 5.
    """

    def __init__(self, first: Matrix, second: Matrix, *, keep_positive: bool = False):
        super().__init__(first)
        check_alike(first, second, tuple(first.shape), "*")
        self.second, self.keep_positive = second, keep_positive

    @property
    def is_stochastic(self) -> bool:
        return False

    def rows_of(self, batch: int, head: int, rows: range) -> Tensor:
        out = self.inner[batch, head, as_slice(rows)] * self.second[batch, head, as_slice(rows)]
        return out.clamp(min=0.0) if self.keep_positive else out

    def __repr__(self) -> str:
        return f"{self.inner} * {self.second}"
