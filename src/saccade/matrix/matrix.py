"""Matrix: base class of lazy attention matrices, which are never stored. All operations are based on `blocks`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from saccade import statistics
from saccade.engine import dropout
from saccade.engine.check_inputs import autocast
from saccade.engine.tiles.grouped_heads import groups_of, product, take
from saccade.engine.to_device import moved, target_of
from saccade.matrix.graph_break import outside_graphs
from saccade.matrix.indexing import SPARSE_LIMIT, Index, part_of, sparse_of
from saccade.matrix.operators import Operators
from saccade.plan import Ranges
from saccade.statistics.row_block import Block, as_slice
from saccade.statistics.statistic import DENSE_LIMIT, MatrixInfo, Statistic, blocks_for, check_statistics
from saccade.statistics.transposed import Transposed
from saccade.support.errors import describe, type_error, unsupported, value_error
from saccade.support.numerics import wide_dtype
from saccade.support.torch_modes import without_autocast
from saccade.support.validation import check_type, is_integer

if TYPE_CHECKING:
    from saccade.statistics.pooled import How


class Matrix(Operators, ABC):
    """A lazy matrix of shape ``[batch, heads, q_len, kv_len]``.

    A subclass defines `shape`, `dtype`, `device`, `kv_heads` and `blocks`. Products, rows, the dense form and all
    statistics are derived from them. A matrix stores tensors, never modules. ``A @ value`` and ``A.mT @ x`` are
    differentiable. Statistics (`compute`, `entropy`, `topk`, `received`, `pooled`) are computed without gradients.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the matrix, (batch, heads, q_len, kv_len)."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype of the matrix's products; weights are computed in float32 or wider."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the matrix's inputs."""

    @property
    @abstractmethod
    def kv_heads(self) -> int:
        """Number of key and value heads of the matrix, a divisor of the number of heads."""

    @abstractmethod
    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        """Yield the matrix in blocks of complete rows, about a megabyte each. Rows that are in no block are 0.

        Args:
            batch, head, rows: restrict the blocks to one batch item, one head and a range of rows with step 1; None
                means all.
        """

    def entries(self, block: Block) -> Tensor:
        """Return the entries of this matrix at the rows and columns of a block, which may belong to another matrix.

        Args:
            block: the block; only its ``batch``, ``heads``, ``rows`` and ``columns`` are read.

        Returns:
            ``[batch, heads, rows, columns]``, with the sizes of the block, in float32 or wider.

        Cost: complete rows of the block's heads are computed, except that a `saccade.matrix.GradientMatrix` computes
        only these entries.
        """
        items, heads = (range(size)[part] for size, part in zip(self.shape, (block.batch, block.heads), strict=False))
        rows, keys = as_slice(block.rows), block.keys
        return torch.stack([torch.stack([self[b, h, rows][:, keys] for h in heads]) for b in items])

    @property
    def is_stochastic(self) -> bool:
        """Whether rows are distributions: non-negative entries that sum to 1 (or 0 in a row without visible keys)."""
        return True

    @property
    def hidden(self) -> float:
        """Value of the matrix at pairs that no block covers."""
        return 0.0

    @property
    def mT(self) -> Transposed[Matrix]:
        """Transposed matrix. ``A.mT @ x`` is the attention that each key receives, weighted by x."""
        return Transposed(self)

    def matmul(self, value: Tensor, *, dropout_p: float = 0.0, seed: int | None = None) -> Tensor:
        """Compute ``A @ value``.

        Args:
            value: ``[batch, kv_heads, kv_len, value_dim]``.
            dropout_p: probability that a weight is dropped *in this product*; A itself is never changed.
            seed: dropout seed, from 0 to 2**63 - 1; drawn from torch's generator when None. The same seed drops the
                same weights: those with the same batch item, head, query position and key position.

        Returns:
            ``[batch, heads, q_len, value_dim]`` in the value's dtype.
        """
        value = self._operand(value, "value", self.kv_heads, self.shape[3])
        dropout.check(dropout_p, seed)
        seed = dropout.draw_seed() if seed is None and dropout_p > 0.0 else seed
        batch, heads, q_len, _ = self.shape
        shape, wide = (batch, heads, q_len, value.shape[3]), wide_dtype(value.dtype)
        out: Tensor | None = None  # allocated like the first part, which has all samples under vmap
        for block in self.blocks():
            weights, groups = block.weights, groups_of(block.heads, heads, self.kv_heads)
            if seed is not None and dropout_p > 0.0:
                weights = weights * self._dropout_mask(block, dropout_p, seed) / (1.0 - dropout_p)
            values = take(value[block.batch, groups], block.columns, 2).to(weights.dtype)
            with without_autocast(self.device):
                part = product(weights, values)
            out = part.new_zeros(shape, dtype=wide) if out is None else out
            out[block.batch, block.heads, as_slice(block.rows)] = part
        return (value.new_zeros(shape) if out is None else out).to(value.dtype)

    @outside_graphs
    def rmatmul(self, x: Tensor) -> Tensor:
        """Return ``A.mT @ x``.

        Args:
            x: ``[batch, heads, q_len, width]``.

        Returns:
            ``[batch, heads, kv_len, width]`` in the dtype of x.

        Cost: one pass over the blocks. With gradients, the weights of every block are saved for the backward pass.
        """
        batch, heads, q_len, kv_len = self.shape
        x = self._operand(x, "x", heads, q_len)
        out = x.new_zeros(batch, heads, kv_len, x.shape[3], dtype=wide_dtype(x.dtype))
        for block in self.blocks():
            rows = x[block.batch, block.heads, as_slice(block.rows)].to(block.weights.dtype)
            with without_autocast(self.device):
                part = block.weights.mT @ rows
            for span, columns in block.by_range(part.mT):
                out[block.batch, block.heads, as_slice(span)] += columns.mT
        return out.to(x.dtype)

    @outside_graphs
    def compute(self, *statistics: Statistic[Any, Any]) -> tuple[Any, ...]:
        """Compute several statistics in one pass over the matrix, and return their results in the same order.

        Args:
            statistics: statistics from `saccade.statistics`, or your own subclasses of `saccade.statistics.Statistic`.

        Raises:
            TypeError: an argument is not a statistic.
            UnsupportedError: a statistic requires rows that are distributions, and `is_stochastic` is False.

        Cost: the weights are computed once for all statistics, a block at a time. Memory is needed for the results and
        one block. No gradients are recorded.

        Example:
            >>> from saccade import AttentionMatrix
            >>> from saccade.statistics import Entropy, Received
            >>> x = torch.zeros(1, 1, 4, 8)
            >>> entropy, received = AttentionMatrix(x, x).compute(Entropy(), Received())
            >>> received
            tensor([[[1., 1., 1., 1.]]])
        """
        check_statistics(statistics)
        for statistic in statistics:
            if statistic.needs_distributions and not self.is_stochastic:
                reason = f"the rows of this {type(self).__name__} do not sum to 1 (is_stochastic is False)"
                hint = "A.topk and A.received need no distributions"
                raise unsupported(type(statistic).__name__, [reason], hint=hint)
        if not statistics:
            return ()
        info = MatrixInfo.of(self)
        with torch.no_grad(), without_autocast(self.device):
            results = self._compute_by_sweep(statistics, info)
            rest = {index: statistic for index, statistic in enumerate(statistics) if index not in results}
            states = {index: statistic.start(info) for index, statistic in rest.items()}
            for block in blocks_for(self, rest.values()):
                states = {index: statistic.add(states[index], block) for index, statistic in rest.items()}
            results |= {index: statistic.finish(states[index]) for index, statistic in rest.items()}
            return tuple(results[index] for index in range(len(statistics)))

    def _compute_by_sweep(self, statistics: Sequence[Statistic[Any, Any]], info: MatrixInfo) -> dict[int, Any]:
        """Compute the statistics that do not need `blocks`, and return the results by index in ``statistics``."""
        return {}

    @outside_graphs
    def entropy(self) -> Tensor:
        """Return the entropy of each row in nats, ``[batch, heads, q_len]``; see `saccade.statistics.Entropy`."""
        return self.compute(statistics.Entropy())[0]

    @outside_graphs
    def topk(self, k: int) -> statistics.Strongest:
        """Return each query's k largest weights and their keys; see `saccade.statistics.TopK`."""
        return self.compute(statistics.TopK(k))[0]

    @outside_graphs
    def received(self) -> Tensor:
        """Return the attention each key receives, ``[batch, heads, kv_len]``; see `saccade.statistics.Received`."""
        return self.compute(statistics.Received())[0]

    @outside_graphs
    def pooled(self, bins: int, *, how: How = "mean") -> Tensor:
        """Return each head's matrix reduced to at most ``bins`` × ``bins`` entries; see `saccade.statistics.Pooled`."""
        return self.compute(statistics.Pooled(bins, how))[0]

    @outside_graphs
    def summary(self, parts: statistics.Parts | None = None) -> statistics.Summary:
        """Return the statistics of every head, compared with uniform attention; see `saccade.statistics.Summary`.

        Raises:
            TypeError: ``parts`` is not a `saccade.statistics.Parts`.
            UnsupportedError: the rows are not distributions, for a reason other than a sink.

        Cost: about two passes over `blocks`. With ``parts``, there is one more pass over the blocks and one over
        uniform attention.
        """
        from saccade.statistics.summary import summary_of  # noqa: PLC0415  only this method needs it

        return summary_of(self, parts=parts)

    def uniform(self) -> Matrix:
        """Return uniform attention under the same mask: each query spreads its weight evenly over its visible keys.

        A statistic of the result is the exact uniform baseline of that statistic: ``A.uniform().compute(statistic)``,
        or ``statistic.uniform(A)``. The row of a query without visible keys is 0. If the matrix is not computed from a
        mask, a key counts as visible if its weight is not 0.

        Raises:
            UnsupportedError: the matrix has no mask, and its rows are not distributions.

        Cost: none until it is used. A statistic costs at most as much as for the matrix itself.

        Example:
            >>> from saccade import AttentionMatrix, masks
            >>> x = torch.randn(1, 1, 3, 4)
            >>> AttentionMatrix(x, x, masks.Causal()).uniform()[0, 0]
            tensor([[1.0000, 0.0000, 0.0000],
                    [0.5000, 0.5000, 0.0000],
                    [0.3333, 0.3333, 0.3333]])
        """
        from saccade.matrix.uniform_matrix import UniformMatrix  # noqa: PLC0415  a matrix itself

        if not self.is_stochastic:
            reason = f"this {type(self).__name__} has no mask, and its rows do not sum to 1 (is_stochastic is False)"
            raise unsupported("a uniform baseline", [reason], hint="the attention matrix itself has one: A.uniform()")
        return UniformMatrix(self, lambda block: block.weights != 0)

    @outside_graphs
    def to_sparse(self, *, limit: int = SPARSE_LIMIT) -> Tensor:
        """Return nonzero weights as a sparse COO tensor ``[batch, heads, q_len, kv_len]`` in float32 or wider.

        Args:
            limit: largest number of weights to return. Each takes 36 bytes (40 in float64).

        Raises:
            TypeError: ``limit`` is not an int.
            ValueError: there are more nonzero weights than ``limit``. Raised during the pass over the matrix.
        """
        return sparse_of(self, limit)

    @outside_graphs
    def __getitem__(self, index: Index) -> Tensor:
        """Return a part of the matrix: ``A[b, h, i]`` is the row of query i in head h of batch item b, ``[kv_len]``.

        ``A[b, h]`` is one head's matrix, ``A[b, h, i:j, k:l]`` a part of it, ``A[..., i, j]`` one weight of each head.
        Only the requested rows are computed, and the rows between them if the step is below 16.
        """
        return part_of(self, index)

    def to(self, *target: torch.device | str | torch.dtype, **kwargs: torch.device | str | torch.dtype | None) -> Self:
        """Return the matrix on a given ``device`` or in a given float ``dtype``, as in ``A.to("cuda", torch.half)``."""
        return moved(self, *target_of(target, kwargs))

    @outside_graphs
    def to_dense(self, *, limit: int = DENSE_LIMIT) -> Tensor:
        """Return all weights, ``[batch, heads, q_len, kv_len]`` in float32 or wider.

        Args:
            limit: largest number of weights to return.

        Raises:
            ValueError: the matrix is larger than ``limit``.
        """
        if math.prod(self.shape) > limit:
            got = f"{math.prod(self.shape):,} weights, {list(self.shape)}"
            hint = "A[b, h, i] gives a row, A @ value and A.mT @ x products; to_dense(limit=...) raises the limit"
            raise value_error("size", f"be at most {limit:,} weights", got, hint=hint)
        dense = torch.full(self.shape, self.hidden, dtype=wide_dtype(self.dtype), device=self.device)
        for block in self.blocks():
            for span, weights in block.by_range(block.weights):
                dense[block.batch, block.heads, as_slice(block.rows), as_slice(span)] = weights
        return dense

    def after_tracing(self) -> Self:
        """Return the matrix with masks of a traced program converted to ordinary masks, to run outside of the graph."""
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={list(self.shape)}, {self.dtype}, {self.device})"

    def positions(self, rows: range, columns: Ranges) -> tuple[Tensor, Tensor]:
        """Return the query and key positions, int64 ``[batch | 1, 1, rows, 1]`` and ``[batch | 1, 1, 1, columns]``.

        By default key j is at position j and query i at ``kv_len - q_len + i``.
        """
        first = self.shape[3] - self.shape[2]
        q = torch.arange(rows.start + first, rows.stop + first, rows.step, device=self.device)
        kv = torch.cat([torch.arange(span.start, span.stop, span.step, device=self.device) for span in columns])
        return q[None, None, :, None], kv[None, None, None, :]

    def _dropout_mask(self, block: Block, dropout_p: float, seed: int) -> Tensor:
        q, kv = (x if len(x) == 1 else x[block.batch] for x in self.positions(block.rows, block.columns))
        b = torch.arange(block.batch.start, block.batch.stop, device=self.device)[:, None, None, None]
        h = torch.arange(block.heads.start, block.heads.stop, device=self.device)[None, :, None, None]
        return dropout.keep(seed, b, h, q, kv, dropout_p)

    def _check_part(self, batch: object, head: object, rows: object) -> None:
        """Raise an error unless ``batch``, ``head`` and ``rows`` are valid arguments of `blocks`."""
        for name, index, size in (("batch", batch, self.shape[0]), ("head", head, self.shape[1])):
            if index is None:
                continue
            if not is_integer(index):
                raise type_error(name, "be an int or None", repr(index))
            if not 0 <= index < size:
                raise value_error(name, f"be at least 0 and below {size}", index)
        if rows is None:
            return
        if not isinstance(rows, range):
            raise type_error("rows", "be a range or None", repr(rows))
        if rows.step != 1:
            raise value_error("rows", "be a range with step 1", rows)

    def _operand(self, x: Tensor, name: str, heads: int, length: int) -> Tensor:
        """Check and return an operand of a matrix product. Under autocast, it is converted to the matrix's dtype."""
        check_type(name, x, Tensor, "be a tensor")
        expected = (self.shape[0], heads, length)
        if x.dim() != 4 or x.shape[:3] != expected:
            rule = f"have shape [{', '.join(map(str, expected))}, width]"
            raise value_error(name, rule, list(x.shape), facts=[f"matrix {list(self.shape)}"])
        x = autocast(x, self.dtype)
        if x.dtype != self.dtype or x.device != self.device:
            rule = f"be {self.dtype} on {self.device}, like the matrix"
            raise value_error(name, rule, f"{x.dtype} on {x.device}", facts=[describe(name, x)])
        return x


class DerivedMatrix(Matrix):
    """A matrix computed from another matrix, with the same shape, dtype, device, heads and `is_stochastic` by default.

    Args:
        inner: the matrix to compute from.
    """

    def __init__(self, inner: Matrix):
        self.inner = inner

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.inner.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def kv_heads(self) -> int:
        return self.inner.kv_heads

    @property
    def is_stochastic(self) -> bool:
        return self.inner.is_stochastic
