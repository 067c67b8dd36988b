"""FeatureMatrix: the lazy matrix of linear attention, defined by features of queries and keys."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.caches import RecurrentCache
from saccade.caches.recurrent import Memory
from saccade.engine.tiles.grouped_heads import groups_of, product
from saccade.masks import Mask
from saccade.matrix import Block, Matrix
from saccade.matrix.uniform_matrix import UniformMatrix
from saccade.mechanisms.checked_mechanism import Approximate, Inputs
from saccade.mechanisms.features.chunks import CHUNK, Line, chunked_sums
from saccade.mechanisms.features.mask_support import Visible, why_no_sum
from saccade.mechanisms.features.prefix_sums import continued, prefix_sums
from saccade.mechanisms.features.sequence_order import Order, check_memory, line_of, rows_that_see
from saccade.mechanisms.linear_time import LinearTimeMatrix, divide_rows
from saccade.mechanisms.readable_tensors import is_readable, is_surely_finite, nonfinite_tokens
from saccade.support.torch_modes import without_autocast

_PIECE = 1 << 20  # elements summed and divided at a time: 4 MB, small enough to reuse memory that was just freed


class Features(NamedTuple):
    """The features of queries or keys, stored as ``exp(logs) * values``.

    Attributes:
        values: ``[batch, heads, len, features]``, float32 or wider.
        logs: ``[batch, heads, len]``, constants that keep the values from overflowing; None for 0.
    """

    values: Tensor
    logs: Tensor | None = None


class FeatureMatrix(LinearTimeMatrix):
    r"""A lazy matrix of linear attention, whose weights are normalised dot products of features.

    .. math:: A_{ij} = \frac{\phi(q_i) \cdot \phi(k_j)}{\epsilon + \sum_{j' \in V(i)} \phi(q_i) \cdot \phi(k_{j'})},
              \quad j \in V(i)

    where V(i) is the set of keys that query i may attend to. A row whose denominator is 0 is set to 0.

    Args:
        query: features of the queries, ``[batch, heads, q_len, features]``. Their logs scale whole rows, so they cancel
            and are ignored.
        key: features of the keys, ``[batch, kv_heads, kv_len, features]``, computed with non-finite keys set to 0.
        visible: the mask.
        dtype: dtype of the inputs and of matrix products.
        eps: added to the denominator, so that rows sum to slightly less than 1.
        tainted: bool ``[batch, kv_heads, kv_len]``, True at non-finite keys. A row that may attend to one is NaN. None
            if there are none.
        nonfinite_queries: bool ``[batch, heads, q_len]``, True at non-finite queries. Their rows are NaN if they may
            attend to any key. None if there are none.
        source: identifies the features. Matrices with equal sources can continue from each other's recurrent state.

    Cost: `matmul` and `rmatmul` take O(n * features * value_dim) time. They need memory for the features, O(n *
    features), and one state, ``[batch, kv_heads, features, value_dim + 1]``; the backward pass stores nothing else.
    With dropout, the product is computed pair by pair in O(q_len * kv_len) time.
    """

    def __init__(
        self,
        query: Features,
        key: Features,
        visible: Visible,
        *,
        dtype: torch.dtype,
        eps: float = 0.0,
        tainted: Tensor | None = None,
        nonfinite_queries: Tensor | None = None,
        source: Hashable = None,
    ):
        shape = (*query.values.shape[:3], key.values.shape[2])
        super().__init__(shape, key.values.shape[1], dtype=dtype, device=query.values.device)
        self._query, self.visible, self.eps = query.values, visible, eps
        self._tainted, self._nonfinite_queries, self.source = tainted, nonfinite_queries, source
        self._key, self._logs = key
        hidden = visible.hidden_keys
        if hidden is not None:
            self._key = self._key.masked_fill(hidden[:, None, :, None], 0.0)
            self._logs = None if self._logs is None else self._logs.masked_fill(hidden[:, None], -math.inf)
        is_sum_of_all = not visible.causal and visible.q_documents is None
        self._order = None if is_sum_of_all else Order.of(visible, shape[2], shape[3])

    @property
    def _heads_per_key(self) -> int:
        return self.shape[1] // max(1, self.kv_heads)

    @property
    def is_stochastic(self) -> bool:
        """Whether rows are distributions, which requires that no feature is below 0 and that eps is 0.

        Cost: one pass over all features.
        """
        return self.eps == 0.0 and bool((self._query >= 0).all()) and bool((self._key >= 0).all())

    def _times(self, value: Tensor) -> Tensor:
        bad = self._tainted
        if not (self.visible.hides_nothing or (bad is None and is_surely_finite(value))):
            nonfinite = ~torch.isfinite(value.detach()).all(-1)
            value = value.masked_fill(nonfinite[..., None], 0.0)
            bad = nonfinite if bad is None else bad | nonfinite
        value, nan = value.to(self._key.dtype), self._nan_rows(bad)
        size = self._piece_len(value)
        out = self._normalised(self._gather(_with_ones(value))) if size is None else self._in_pieces(value, size)
        return out if nan is None else out.masked_fill(nan[..., None], math.nan)

    def rmatmul(self, x: Tensor) -> Tensor:
        """Return ``A.mT @ x`` in linear time; see `Matrix.rmatmul`. Shared keys are repeated for every head."""
        x = self._operand(x, "x", self.shape[1], self.shape[2])
        if not (self._tainted is self._nonfinite_queries is None and is_surely_finite(x)):
            return super().rmatmul(x)  # find the affected rows pair by pair
        with without_autocast(self.device):
            total = self._gather(torch.ones_like(self._key[..., :1]))
            rows = divide_rows(x.to(total.dtype), total, self.eps)
            return self._scatter(self._without_hidden(rows)).to(x.dtype)

    def advance(self, value: Tensor, memory: Memory | None) -> tuple[Tensor, Memory]:
        """Return the output for new tokens and the state after them; ``memory`` is the state before them.

        Raises:
            ValueError: the mask is not causal, or the memory is from different features or a different mask.
        """
        value = self._operand(value, "value", self.kv_heads, self.shape[3])
        check_memory(self, self._order, self.visible, memory, (self._key.shape[3], value.shape[3] + 1))
        with without_autocast(self.device):
            bad = ~torch.isfinite(value.detach()).all(-1)
            bad = bad if self._tainted is None else bad | self._tainted
            if self.visible.hidden_keys is not None:
                bad = bad & ~self.visible.hidden_keys[:, None]
            clean = _with_ones(value.masked_fill(bad[..., None], 0.0).to(self._key.dtype))
            line = self._line_after(memory)
            out, state, carried = continued(self._query, self._key, clean, line, memory)
            out = self._normalised(out)
            tainted = bad.new_zeros(bad.shape[:2])
            earlier = tainted if memory is None else memory.taints
            if not is_readable(bad, earlier) or bool(bad.any()) or bool(earlier.any()):
                touched, tainted = self._tainted_by(bad, line, memory)
                out = out.masked_fill(touched, math.nan)
            if self._nonfinite_queries is not None:
                sees = (
                    self._rows_that_see(torch.ones_like(bad))
                    if memory is None
                    else ~torch.zeros_like(self._nonfinite_queries)
                )
                out = self._without_hidden(out.masked_fill((self._nonfinite_queries & sees)[..., None], math.nan))
        return out.to(value.dtype), Memory(state, carried.peak, carried.segment, tainted, self.source)

    def uniform(self) -> Matrix:
        return UniformMatrix(self, self.visible.in_block)

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        nan = self._nan_rows(self._tainted)
        for items, heads, span in self._pieces(batch, head, rows):
            groups = groups_of(heads, self.shape[1], self.kv_heads)
            stop = self.shape[3]
            if self._order is not None and not self._order.is_sorted:
                stop = span.stop + self._order.past
            keys = self._key[items, groups, :stop]
            allowed = self.visible.allowed(items, span, range(stop))
            with without_autocast(self.device):
                weights = product(self._query[items, heads, span.start : span.stop], keys.mT)
                if self._logs is not None:
                    factors = _relative(self._logs[items, groups, None, :stop].masked_fill(~allowed, -math.inf))
                    repeats = (heads.stop - heads.start) // factors.shape[1]
                    weights = weights * factors.repeat_interleave(repeats, 1)
                weights = weights.masked_fill(~allowed, 0.0)
                weights = divide_rows(weights, weights.sum(-1, keepdim=True), self.eps)
            if nan is not None:
                weights = weights.masked_fill(nan[items, heads, span.start : span.stop, None], math.nan)
            yield Block(items, heads, span, (range(stop),), weights)

    def _normalised(self, out: Tensor) -> Tensor:
        return self._without_hidden(divide_rows(out[..., :-1], out[..., -1:], self.eps))

    def _without_hidden(self, rows: Tensor) -> Tensor:
        hidden = self.visible.hidden_rows
        return rows if hidden is None else rows.masked_fill(hidden[:, None, :, None], 0.0)

    def _nan_rows(self, bad: Tensor | None) -> Tensor | None:
        """Return which rows must be NaN because their query, or a key that they may attend to, is not finite."""
        nan = None if bad is None else self._rows_that_see(bad)
        if self._nonfinite_queries is None:
            return nan
        nonfinite_queries = self._nonfinite_queries & self._rows_that_see(
            torch.ones_like(self._key[..., 0], dtype=torch.bool)
        )
        return nonfinite_queries if nan is None else nan | nonfinite_queries

    def _rows_that_see(self, keys: Tensor) -> Tensor:
        """Return which rows may attend to at least one of the marked keys, bool ``[batch, heads, q_len]``."""
        return rows_that_see(self, self._order, self.visible, keys)

    def _line_after(self, memory: Memory | None) -> Line:
        """Return the weights and segments for a prefix sum over tokens that follow a recurrent state."""
        segments, floor = self.visible.kv_documents, None
        if memory is not None and segments is not None and memory.segment is not None:
            segments = torch.maximum(segments, memory.segment[:, None])  # leading hidden tokens stay in that document
        if memory is not None and self._logs is not None:
            floor = memory.peaks[..., None].expand_as(self._logs)
            if segments is not None and memory.segment is not None:
                floor = floor.masked_fill((segments != memory.segment[:, None])[:, None], -math.inf)
        return line_of(self._logs, segments, floor)

    def _tainted_by(self, bad: Tensor, line: Line, memory: Memory | None) -> tuple[Tensor, Tensor]:
        """Return the rows that see a non-finite key, earlier or new, and the heads whose state now contains one."""
        line, marks = Line(segments=line.segments), bad[..., None].to(self._key.dtype)
        before = memory
        if memory is not None:
            flags = memory.taints[..., None, None].to(self._key.dtype)
            before = memory._replace(state=flags, peak=None)
        ones = torch.ones_like(self._query[..., :1])
        out, state, _ = continued(ones, torch.ones_like(marks), marks, line, before)
        return self._without_hidden(out) > 0.5, state[..., 0, 0] > 0.5

    def _gather(self, c: Tensor) -> Tensor:
        """Sum c, ``[batch, kv_heads, kv_len, width]``, over the keys each row sees, weighted by feature products."""
        if self._order is None or 0 in self.shape:
            key = self._key if self._logs is None else self._key * _relative(self._logs)[..., None]
            return product(self._query, key.mT @ c)
        order = self._order
        a, b, c = order.with_rows(self._query), order.with_keys(self._key), order.with_keys(c)
        return order.rows_of(prefix_sums(a, b, c, order.line(self._logs)))

    def _piece_len(self, value: Tensor) -> int | None:
        """Return the number of tokens to process at a time, a multiple of the chunk size, or None for all at once.

        For a long sequence, allocating memory for all sums at once would take as long as computing them.
        """
        order, (batch, heads, q_len, _) = self._order, self.shape
        size = CHUNK * max(1, _PIECE // max(1, batch * heads * CHUNK * value.shape[3]))
        if order is None or order.is_sorted or order.past or q_len <= size or not is_readable(value):
            return None
        needs = any(x is not None and x.requires_grad for x in (self._query, self._key, self._logs, value))
        return None if needs and torch.is_grad_enabled() else size

    def _in_pieces(self, value: Tensor, size: int) -> Tensor:
        """Return the output for a long sequence, computed part by part and without autograd."""
        assert self._order is not None  # checked by `_piece_len`
        line, summed = self._order.line(self._logs), None
        out = value.new_empty(*self.shape[:3], value.shape[3])
        for start in range(0, self.shape[2], size):
            part = slice(start, min(start + size, self.shape[2]))
            a, b, c = (x[:, :, part] for x in (self._query, self._key, value))
            summed = chunked_sums(a, b, _with_ones(c), line.at(part), before=summed)
            out[:, :, part] = divide_rows(summed.out[..., :-1], summed.out[..., -1:], self.eps)
        return self._without_hidden(out)

    def _scatter(self, x: Tensor) -> Tensor:
        """Sum x, ``[batch, heads, q_len, width]``, over the rows that see each key, weighted by feature products."""
        key = self._key.repeat_interleave(self._heads_per_key, 1)
        logs = None if self._logs is None else self._logs.repeat_interleave(self._heads_per_key, 1)
        if self._order is None or 0 in self.shape:
            key = key if logs is None else key * _relative(logs)[..., None]
            return key @ (self._query.mT @ x)
        order = self._order
        a, b, x = order.with_rows(self._query), order.with_keys(key), order.with_rows(x)
        return order.keys_of(prefix_sums(b, a, x, order.line(logs).transposed(), reverse=True))


def _with_ones(value: Tensor) -> Tensor:
    """Append a column of ones to values. Its weighted sum is the denominator of linear attention."""
    return torch.cat([value, value.new_ones(*value.shape[:3], 1)], -1)


def _relative(logs: Tensor) -> Tensor:
    """Return ``exp(logs)`` divided by its maximum along the last axis."""
    if not logs.shape[-1]:
        return logs
    peak = logs.amax(-1, keepdim=True)
    return (logs - peak.masked_fill(peak == -math.inf, 0.0)).exp()


class FeatureMechanism(Approximate):
    """The base class of mechanisms that return a `FeatureMatrix`."""

    eps: float = 0.0

    @abstractmethod
    def features(self, query: Tensor, key: Tensor) -> tuple[Features, Features, Hashable]:
        """Return finite features of queries and keys, ``[batch, heads, len, features]``, and their source.

        The source identifies the feature map: only features with equal sources may be added to the same sum.
        """

    def reasons(self, mask: Mask) -> tuple[str, ...]:
        return why_no_sum(mask)

    def new_cache(self, max_len: int | None = None) -> RecurrentCache:
        """Return an empty `saccade.caches.RecurrentCache`, of constant size."""
        return RecurrentCache(max_len)

    def _matrix_of(self, inputs: Inputs) -> FeatureMatrix:
        (query, nonfinite_queries), (key, tainted) = (
            _zero_nonfinite(x, inputs.wide) for x in (inputs.query, inputs.key)
        )
        of_query, of_key, source = self.features(query, key)
        dtype, visible = inputs.query.dtype, Visible.of(inputs)
        return FeatureMatrix(
            of_query,
            of_key,
            visible,
            dtype=dtype,
            eps=self.eps,
            tainted=tainted,
            nonfinite_queries=nonfinite_queries,
            source=source,
        )


def _zero_nonfinite(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Set non-finite queries or keys to 0. Return the result and which tokens were set to 0; None if there are none."""
    bad = nonfinite_tokens(x)
    return (x if bad is None else x.masked_fill(bad[..., None], 0.0)).to(dtype), bad
