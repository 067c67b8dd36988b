"""RecurrenceMatrix: a recurrence as a lower-triangular lazy matrix."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.caches.recurrent import Memory
from saccade.matrix import Block, Matrix
from saccade.matrix.uniform_matrix import UniformMatrix
from saccade.mechanisms.features.mask_support import Visible
from saccade.mechanisms.features.sequence_order import Order, check_memory, rows_that_see
from saccade.mechanisms.linear_time import LinearTimeMatrix
from saccade.mechanisms.readable_tensors import is_readable, is_surely_finite
from saccade.mechanisms.recurrences.product import product, transposed
from saccade.mechanisms.recurrences.recurrence_spec import FEW, Rule, product_by_token
from saccade.statistics import Received
from saccade.statistics.statistic import MatrixInfo, Statistic
from saccade.support.torch_modes import is_transformed, without_autocast

_ENTRIES = 1 << 22  # weights in a block; one pass from the last token computes all its rows, in all heads
_FEWEST_ROWS = 64


class RecurrenceMatrix(LinearTimeMatrix):
    r"""A recurrence as a lazy matrix that is never materialised, with products in linear time.

    .. math:: A_{ij} = s\, \beta_j\, q_i^T \Big( \prod_{t=i}^{j+1} M_t \Big) k_j, \quad j \le i, \qquad
              M_t = D_t \;\text{or}\; (I - \beta_t k_t r_t^T) D_t, \qquad D_t = \mathrm{diag}(\exp g_t)

    Every block below the diagonal has at most rank ``head_dim``, because earlier tokens affect later ones only through
    a state ``[head_dim, value_dim]``. There is no denominator, so weights may have any sign and rows any sum.

    Args:
        query: ``[batch, heads, q_len, head_dim]``, float32 or wider and finite. Queries and keys belong to the
            same tokens, or the queries to the last of them.
        key: ``[batch, key_heads, kv_len, head_dim]``, float32 or wider and finite. The number of key heads divides
            that of value heads.
        decay: g, ``[batch, kv_heads, kv_len, 1 | head_dim]``, at most 0; None for 0.
        beta: ``[batch, kv_heads, kv_len, 1]``; None for 1.
        visible: the mask, which is causal.
        recall: r, the keys with which the delta rule reads the state, with the shape of ``key``; None for ``key``.
        scale: s.
        is_delta: whether to use the delta rule: a token writes the difference between its value and what its recalling
            key reads from the state.
        dtype: dtype of the inputs and of matrix products.
        tainted, nonfinite_queries, source: as in `saccade.mechanisms.features.feature_matrix.FeatureMatrix`.

    Cost: `matmul` and `rmatmul` take O(n * head_dim * value_dim) time and O(n * head_dim) memory plus a state. Each
    block of rows takes one pass from its last row to the first token. With dropout, a product is computed pair by pair.
    """

    is_stochastic = False

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        decay: Tensor | None,
        beta: Tensor | None,
        visible: Visible,
        *,
        recall: Tensor | None = None,
        scale: float,
        is_delta: bool,
        dtype: torch.dtype,
        tainted: Tensor | None = None,
        nonfinite_queries: Tensor | None = None,
        source: Hashable = None,
    ):
        batch, q_heads, q_len, _ = query.shape
        kv_heads = max(key.shape[1], *(x.shape[1] for x in (decay, beta) if x is not None), 0)
        heads = max(q_heads, kv_heads)
        super().__init__((batch, heads, q_len, key.shape[2]), kv_heads, dtype=dtype, device=query.device)
        self.visible, self.source, self._tainted, self._nonfinite_queries = visible, source, tainted, nonfinite_queries
        self._order = Order.of(visible, q_len, key.shape[2])
        rows, keys = visible.hidden_rows, visible.hidden_keys
        query = query if rows is None else query.masked_fill(rows[:, None, :, None], 0.0)
        if keys is not None:  # a hidden token writes nothing and lets nothing decay
            key = key.masked_fill(keys[:, None, :, None], 0.0)
            recall = None if recall is None else recall.masked_fill(keys[:, None, :, None], 0.0)
            decay = None if decay is None else decay.masked_fill(keys[:, None, :, None], 0.0)
        line = self._order.with_rows(query)
        segments = self._order.segments
        segments = None if segments is None else segments.expand(batch, -1).repeat_interleave(heads, 0)
        parts = [None if x is None else self._lines(self._order.with_keys(x)) for x in (key, decay, beta, recall)]
        assert parts[0] is not None
        self._rule = Rule(self._lines(line), parts[0], parts[1], parts[2], segments, parts[3], scale, is_delta)

    @property
    def key(self) -> Tensor | None:
        """Keys up to the last query, ``[batch, heads, len, head_dim]``; None if tokens are not in order."""
        return None if self._order.is_sorted else self._rule.key.unflatten(0, self.shape[:2])

    def of_heads(self, heads: Sequence[int]) -> RecurrenceMatrix:
        """Return the recurrence matrix with only the given heads, in the given order."""
        part, (batch, head_count, q_len, kv_len) = copy.copy(self), self.shape
        part.shape, part.kv_heads = (batch, len(heads), q_len, kv_len), len(heads)
        lines = [item * head_count + head for item in range(batch) for head in heads]
        part._rule = self._rule.of(lines, slice(None))
        marks = (self._tainted, self._nonfinite_queries)
        selected_marks = [
            None if x is None else x[:, [head * x.shape[1] // head_count for head in heads]] for x in marks
        ]
        part._tainted, part._nonfinite_queries = selected_marks
        return part

    def below(self, earlier: RecurrenceMatrix) -> RecurrenceMatrix | None:
        """Return a recurrence matrix with the rows of an earlier call above the rows of this matrix.

        If either call has documents or hidden tokens, or if rows between the calls are missing, return None.
        """
        q_len, past, visible = earlier.shape[2], self._order.past, self.visible
        can_join = all(
            matrix.key is not None
            and matrix._rule.segments is matrix.visible.hidden_keys is matrix.visible.hidden_rows is None
            for matrix in (earlier, self)
        )
        if not can_join or earlier._order.length != past or self.shape[:2] != earlier.shape[:2]:
            return None
        joined, first = copy.copy(self), earlier._order.past
        joined.shape = (*self.shape[:2], q_len + self.shape[2], self.shape[3])
        joined._rule = self._rule._replace(query=torch.cat([earlier._rule.query, self._rule.query[:, past:]], 1))
        joined._order = self._order._replace(past=first)
        rows = torch.cat([earlier.visible.q_positions, visible.q_positions], 1)
        joined.visible = dataclasses.replace(visible, offset=first, q_positions=rows)
        if earlier._nonfinite_queries is not None or self._nonfinite_queries is not None:
            none = [torch.zeros(matrix.shape[:3], dtype=torch.bool, device=self.device) for matrix in (earlier, self)]
            both = ((earlier._nonfinite_queries, none[0]), (self._nonfinite_queries, none[1]))
            joined._nonfinite_queries = torch.cat([x if mark is None else mark.expand_as(x) for mark, x in both], 2)
        return joined

    def rmatmul(self, x: Tensor) -> Tensor:
        """Return ``A.mT @ x`` in linear time, with one pass from the last token to the first; see `Matrix.rmatmul`."""
        x = self._operand(x, "x", self.shape[1], self.shape[2])
        if not (self._tainted is self._nonfinite_queries is None and is_surely_finite(x)):
            return super().rmatmul(x)  # find the affected rows pair by pair
        with without_autocast(self.device):
            sums = self._transposed(self._rule, x.to(self._rule.key.dtype).flatten(0, 1))
        sums = sums.unflatten(0, self.shape[:2])
        return F.pad(sums, (0, 0, 0, self.shape[3] - sums.shape[2])).to(x.dtype)

    def advance(self, value: Tensor, memory: Memory | None) -> tuple[Tensor, Memory]:
        """Return the output for new tokens and the state after them; ``memory`` is the state before them.

        Args:
            value: ``[batch, kv_heads, kv_len, value_dim]``.
            memory: ``Memory(state)`` with a state ``[batch, kv_heads, head_dim, value_dim]``; None for zeros. Gradients
                flow through this memory and the returned one.

        Raises:
            ValueError: the queries and keys belong to different tokens, or the memory is from a different recurrence or
                mask.
        """
        value = self._operand(value, "value", self.kv_heads, self.shape[3])
        if memory is not None and memory.segment is None and self._rule.segments is not None:
            memory = memory._replace(segment=self._rule.segments[:: self.shape[1], :1].flatten())  # of the first token
        check_memory(self, self._order, self.visible, memory, self._state_size(value.shape[3]))
        bad = ~torch.isfinite(value.detach()).all(-1)
        bad = bad if self._tainted is None else bad | self._tainted
        if self.visible.hidden_keys is not None:
            bad = bad & ~self.visible.hidden_keys[:, None]
        rule, segment, before = self._rule, self._segment, bad.new_zeros(bad.shape[:2])
        if memory is not None:
            before, (rule, segment) = memory.taints, self._after(memory)
        # With a memory, a row that sees none of the new keys still sees earlier ones.
        hidden = self.visible.hidden_rows
        blind = self._empty_rows if memory is None else None if hidden is None else hidden[:, None]
        clean = value.masked_fill(bad[..., None], 0.0)
        with without_autocast(self.device):
            out, state = self._product(rule, clean, None if memory is None else memory.state, segment, blind)
        touched, tainted = self._rows_after_bad(bad, rule.segments, before, segment)
        touched = touched if blind is None else touched & ~blind
        if not is_readable(touched) or bool(touched.any()):
            out = out.masked_fill(touched[..., None], math.nan)
        last = None if rule.segments is None else rule.segments[:: self.shape[1], -1:].flatten()
        if rule.segments is not None and not self.shape[2]:
            last = None if memory is None else memory.segment
        return out.to(value.dtype), Memory(state, None, last, tainted, self.source)

    def uniform(self) -> Matrix:
        return UniformMatrix(self, self.visible.in_block)

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        self._check_part(batch, head, rows)
        for b, heads, span in spans_of(self, batch, head, rows):
            weights = self.weights_of(b, heads, span)
            yield Block(slice(b, b + 1), heads, span, (range(weights.shape[3]),), weights)

    def weights_of(self, batch: int, heads: slice, rows: range) -> Tensor:
        """Return the weights of a range of rows for all keys up to the last row, ``[1, heads, rows, length]``."""
        first, length = batch * self.shape[1], self._order.past + rows[-1] + 1
        rule = self._rule.of(slice(first + heads.start, first + heads.stop), slice(length))
        eye = torch.eye(len(rows), dtype=rule.key.dtype, device=self.device)
        if rows.step > 1:
            eye = F.pad(eye[:, None], (0, 0, 0, rows.step - 1)).flatten(0, 1)[: rows[-1] - rows[0] + 1]
        with without_autocast(self.device):
            weights = self._transposed(rule, eye.expand(len(rule.key), -1, -1)).mT[None]
        nan = self._nan_rows(self._tainted)
        if nan is None:
            return weights
        return weights.masked_fill(nan[batch, None, heads, rows.start : rows.stop : rows.step, None], math.nan)

    def _compute_by_sweep(self, statistics: Sequence[Statistic[Any, Any]], info: MatrixInfo) -> dict[int, Any]:
        return column_sums(self, statistics)

    def _times(self, value: Tensor) -> Tensor:
        bad = self._tainted
        if not (bad is None and is_surely_finite(value)):
            nonfinite = ~torch.isfinite(value.detach()).all(-1)
            value = value.masked_fill(nonfinite[..., None], 0.0)
            bad = nonfinite if bad is None else bad | nonfinite
        out, nan = self._product(self._rule, value, None, self._segment, self._empty_rows)[0], self._nan_rows(bad)
        return out if nan is None else out.masked_fill(nan[..., None], math.nan)

    def _product(
        self, rule: Rule, value: Tensor, state: Tensor | None, segment: Tensor | None, blind: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the output of each row (0 if the row sees no key), and the last state of each key head."""
        dtype, (batch, heads, q_len, _) = rule.key.dtype, self.shape
        value = self._lines(self._order.with_keys(value.to(dtype)))
        if state is None:
            begin = value.new_zeros(batch * heads, *self._state_size(value.shape[2]))
        else:
            begin = self._lines(state.to(dtype))
        out, last = self._run(rule, value, begin, segment)
        last = last.unflatten(0, (batch, heads))[:, :: max(1, heads // max(1, self.kv_heads))]
        out = out.unflatten(0, (batch, heads))[:, :, out.shape[1] - q_len :]
        # A row that sees no key passes on no gradient, not even NaN.
        return out if blind is None else out.masked_fill(blind[..., None], 0.0), last

    def _run(self, rule: Rule, value: Tensor, state: Tensor, segment: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the outputs of a recurrence and its last state; see `recurrences.product.product`."""
        run = product_by_token if value.shape[1] <= FEW or is_transformed() else product
        return run(rule, value, state, segment)

    def _transposed(self, rule: Rule, x: Tensor) -> Tensor:
        """Return ``A.mT @ x`` for a recurrence, where x contains the entries of the last rows."""
        leaves = [one for one in (*rule.tensors, x) if one is not None and one.requires_grad]
        if not is_transformed() and not (torch.is_grad_enabled() and leaves):
            return transposed(rule, x, None if rule.segments is None else rule.segments[:, 0])
        lines, length, head_dim = rule.key.shape  # the gradient of x · (A v) with respect to v, for any v
        with torch.enable_grad():
            value = x.new_zeros(lines, length, x.shape[2], requires_grad=True)
            begin = x.new_zeros(lines, head_dim, x.shape[2])
            out, _ = product_by_token(rule, value, begin, None if rule.segments is None else rule.segments[:, 0])
            (grad,) = torch.autograd.grad(out[:, length - x.shape[1] :], value, x, create_graph=True)
        return grad

    def _state_size(self, value_dim: int) -> tuple[int, int]:
        """Return the size of the state of one key head for values of this width."""
        return self._rule.key.shape[2], value_dim

    def _lines(self, x: Tensor) -> Tensor:
        """Flatten ``[batch, h, len, width]`` to one sequence per head and batch item; repeat heads if h is smaller."""
        heads = self.shape[1]
        return (x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)).flatten(0, 1)

    @property
    def _segment(self) -> Tensor | None:
        """The segment of the initial state, which is 0: the segment of the first token."""
        segments = self._rule.segments
        return None if segments is None or not segments.shape[1] else segments[:, 0]

    def _after(self, memory: Memory) -> tuple[Rule, Tensor | None]:
        """Return the recurrence for tokens that follow a stored state, and that state's segment for every head."""
        rule = self._rule
        if rule.segments is None or memory.segment is None:
            return rule, self._segment
        segment = memory.segment.expand(self.shape[0]).repeat_interleave(self.shape[1], 0)
        # A token outside all documents counts as part of the document before it.
        return rule._replace(segments=torch.maximum(rule.segments, segment[:, None])), segment

    def _nan_rows(self, bad: Tensor | None) -> Tensor | None:
        """Return which rows must be NaN: those that follow a non-finite token, or that have a non-finite query."""
        nan = None if bad is None else rows_that_see(self, self._order, self.visible, bad)
        if self._nonfinite_queries is None:
            return nan
        blind = self._empty_rows
        nonfinite_queries = self._nonfinite_queries if blind is None else self._nonfinite_queries & ~blind
        return nonfinite_queries if nan is None else nan | nonfinite_queries

    @property
    def _empty_rows(self) -> Tensor | None:
        """The rows that see no key, bool ``[batch | 1, heads, q_len]``; None if no key or row is hidden."""
        if self.visible.hidden_rows is self.visible.hidden_keys is None:
            return None
        anything = torch.ones(self.shape[0], 1, self.shape[3], dtype=torch.bool, device=self.device)
        return ~rows_that_see(self, self._order, self.visible, anything)

    def _rows_after_bad(
        self, bad: Tensor, segments: Tensor | None, before: Tensor, segment: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the rows that depend on a non-finite token, earlier or new, and the heads whose state contains one."""
        groups, heads = bad.shape[1], self.shape[1]
        whole = torch.cat([before[..., None], bad], 2).to(torch.int64)
        if segments is None or segment is None:
            follows_bad = whole.cummax(2).values
        else:
            line = torch.cat([segment[:, None], segments], 1).unflatten(0, (-1, heads))[:, :1]
            indices = torch.arange(whole.shape[2], device=bad.device)
            begins = F.pad((line[..., 1:] != line[..., :-1]) * indices[1:], (1, 0)).cummax(2).values
            follows_bad = ((indices * whole).masked_fill(whole == 0, -1).cummax(2).values >= begins).to(torch.int64)
        rows = follows_bad[..., 1:].bool().repeat_interleave(heads // groups, 1)
        rows = rows if self._nonfinite_queries is None else rows | self._nonfinite_queries
        return rows, follows_bad[..., -1].bool().expand(before.shape)


def spans_of(
    matrix: Matrix, batch: int | None, head: int | None, rows: range | None
) -> Iterator[tuple[int, slice, range]]:
    """Yield the item, heads and rows of each block of a recurrence: all heads at once, and many rows for each pass."""
    _, count, q_len, kv_len = matrix.shape
    heads = slice(0, count) if head is None else slice(head, head + 1)
    rows = range(q_len) if rows is None else rows
    height = max(_FEWEST_ROWS, _ENTRIES // max(1, kv_len * (heads.stop - heads.start)))
    for b in range(matrix.shape[0]) if batch is None else [batch]:
        for start in range(rows.start, rows.stop, height) if kv_len and heads.stop else ():
            yield b, heads, range(start, min(start + height, rows.stop))


def column_sums(matrix: Matrix, statistics: Sequence[Statistic[Any, Any]]) -> dict[int, Any]:
    """Return the results of the statistics that are column sums, by index, computed with one matrix product.

    All other statistics are left out, because they need a pass over the rows.
    """
    indices = [index for index, statistic in enumerate(statistics) if type(statistic) is Received]
    if not indices:
        return {}
    ones = torch.ones(*matrix.shape[:3], 1, dtype=matrix.dtype, device=matrix.device)
    return dict.fromkeys(indices, matrix.rmatmul(ones)[..., 0].double())
