"""EarlierSegments: a compressive memory of all earlier segments, as a lazy matrix."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.engine.tiles.grouped_heads import groups_of, product
from saccade.matrix import Block
from saccade.mechanisms.checked_mechanism import Inputs
from saccade.mechanisms.linear_time import LinearTimeMatrix, divide_rows, take_rows
from saccade.mechanisms.readable_tensors import is_surely_finite, nonfinite_tokens
from saccade.support.numerics import wide_dtype
from saccade.support.torch_modes import without_autocast

_NO_SEGMENT = 1 << 62  # larger than every segment index


class EarlierSegments(LinearTimeMatrix):
    r"""A lazy matrix of attention to earlier segments, through a memory that is updated one segment at a time.

    .. math:: A_{ij} = \frac{\sigma(q_i)}{\sigma(q_i) z_{s-1}}
              \Big( \prod_{u=s-1}^{t+1} (I - \sigma(K_u)^\top B_u) \Big) \sigma(k_j)^\top, \qquad
              B_u = \frac{\sigma(K_u)}{\sigma(K_u) z_{u-1}}

    for a query in segment s and a key in segment t < s. With the linear update, there is no product over segments. Rows
    without an earlier segment are 0.

    Args:
        query: ``[batch, heads, q_len, head_dim]``.
        key: ``[batch, kv_heads, kv_len, head_dim]``.
        rows, columns: the segment layouts of queries and keys.
        hidden: bool ``[batch | 1, kv_len]``, True at keys that no query sees; None if there are none.
        is_delta: whether to use the delta rule: a segment writes the difference between its values and what its keys
            read from the memory.

    Cost: `matmul` and `rmatmul` take O(n * head_dim * value_dim) time, with a few operations for each segment. Each
    block of rows takes a pass over all keys.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        rows: SegmentLayout,
        columns: SegmentLayout,
        *,
        hidden: Tensor | None = None,
        is_delta: bool = False,
    ):
        shape = (*query.shape[:3], key.shape[2])
        super().__init__(shape, key.shape[1], dtype=query.dtype, device=query.device)
        self._query, self._key, self._is_delta = query, key, is_delta
        self._rows, self._columns, self._hidden = rows, columns, hidden
        self._tainted, self._nonfinite_queries = (nonfinite_tokens(x) for x in (key, query))

    @property
    def is_stochastic(self) -> bool:
        """Whether the update is linear: rows are then distributions, except in the first segment, where they are 0."""
        return not self._is_delta

    def advance_segments(
        self, value: Tensor, memory: Tensor | None, tainted: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Return the output for tokens that follow a memory of all earlier segments, and the updated memory.

        Args:
            value: ``[batch, kv_heads, kv_len, value_dim]``.
            memory: ``[batch, kv_heads, head_dim, value_dim + 1]``, M with z as its last column; None for 0.
            tainted: bool ``[batch, kv_heads]``, True where a NaN or inf was written to the memory; None if there is
                none.

        Returns:
            The output; the memory of all segments except each item's last; ``tainted`` for this memory; and which
            tokens are in the last segment, bool ``[batch | 1, kv_len]``. The caller must store these tokens.
        """
        value = self._operand(value, "value", self.kv_heads, self.shape[3])
        segments = self._columns.segments
        is_open = segments >= 0
        if segments.shape[1]:
            is_open = is_open & (segments == segments.amax(1, keepdim=True))
        with without_autocast(self.device):
            value, bad = self._clean(value)
            out, after = self._product(value, memory, is_open)
            nan = self._nan_rows(bad, memory, tainted)
        out = out if nan is None else out.masked_fill(nan[..., None], math.nan)
        if bad is not None:
            now = (bad & ~is_open[:, None]).any(-1)
            tainted = now if tainted is None else now | tainted
        return out, after, tainted, is_open

    def rmatmul(self, x: Tensor) -> Tensor:
        """Return ``A.mT @ x`` in linear time, computed from the last segment to the first; see `Matrix.rmatmul`."""
        x = self._operand(x, "x", self.shape[1], self.shape[2])
        if not (self._tainted is self._nonfinite_queries is None and is_surely_finite(x)):
            return super().rmatmul(x)  # find the affected rows pair by pair
        with without_autocast(self.device):
            lines, keys, recalled = self._parts()
            share = self.shape[1] // max(1, self.kv_heads)
            keys, recalled = (y.repeat_interleave(share, 1) for y in (keys, recalled))
            inputs = self._rows.to_segment_order(x.to(lines.dtype))
            state = inputs.new_zeros(*self.shape[:2], keys.shape[3], x.shape[3])
            outs = [keys[:, :, :0] @ state]
            for read, written in zip(reversed(self._rows.spans), reversed(self._columns.spans), strict=True):
                outs.append(keys[:, :, written] @ state)
                if self._is_delta:
                    state = state - recalled[:, :, written].mT @ outs[-1]
                state = state + lines[:, :, read].mT @ inputs[:, :, read]
            return self._columns.to_token_order(torch.cat(outs[::-1], 2)).to(x.dtype)

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        nan, parts = self._nan_rows(self._bad_keys(self._tainted), None, None), None
        for items, heads, span in self._pieces(batch, head, rows):
            groups = groups_of(heads, self.shape[1], self.kv_heads)
            with without_autocast(self.device):
                if parts is None:
                    lines, *both = self._parts()
                    parts = (self._rows.to_token_order(lines), *both)
                weights = self._rows_of(parts, items, heads, groups, slice(span.start, span.stop))
            if nan is not None:
                weights = weights.masked_fill(nan[items, heads, span.start : span.stop, None], math.nan)
            yield Block(items, heads, span, (range(self.shape[3]),), weights)

    def _times(self, value: Tensor) -> Tensor:
        value, bad = self._clean(value)
        out, nan = self._product(value, None, None)[0], self._nan_rows(bad, None, None)
        return out if nan is None else out.masked_fill(nan[..., None], math.nan)

    def _product(self, value: Tensor, memory: Tensor | None, is_open: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the output from the memory of earlier segments, and the memory after all finished segments."""
        lines = self._rows.to_segment_order(self._features(self._query, self._nonfinite_queries))
        spans = self._columns.spans
        empty = lines.new_zeros(self.shape[0], self.kv_heads, lines.shape[3], value.shape[3] + 1)
        state = empty if memory is None else memory
        outs, keys = [lines[..., :0, :1].expand(-1, -1, -1, value.shape[3])], None
        if len(spans) > 1:  # no query reads the last segment from the memory
            inputs = self._columns.to_segment_order(F.pad(value.to(lines.dtype), (0, 1), value=1.0))
            keys = self._keys(is_open)
        for read, written in zip(self._rows.spans, spans, strict=True):
            outs.append(_normalise(product(lines[:, :, read], state)))
            if keys is not None and written is not spans[-1]:
                brought = inputs[:, :, written]
                if self._is_delta:
                    brought = brought - F.pad(_normalise(keys[:, :, written] @ state), (0, 1))
                state = state + keys[:, :, written].mT @ brought
        return self._rows.to_token_order(torch.cat(outs, 2)), memory if keys is None else state

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return, in segment order, the normalised queries, the keys, and the keys normalised by the earlier memory."""
        lines = self._rows.to_segment_order(self._features(self._query, self._nonfinite_queries))
        keys = self._keys(None)
        norm = keys.new_zeros(*keys.shape[:2], keys.shape[3], 1)
        totals = [lines[..., :0, :1]], [keys[..., :0, :1]]
        for read, written in zip(self._rows.spans, self._columns.spans, strict=True):
            totals[0].append(product(lines[:, :, read], norm))
            totals[1].append(keys[:, :, written] @ norm)
            norm = norm + keys[:, :, written].sum(2)[..., None]
        lines, recalled = (
            _normalise(torch.cat([x, torch.cat(sums, 2)], 3)) for x, sums in zip((lines, keys), totals, strict=True)
        )
        return lines, keys, recalled

    def _rows_of(self, parts: tuple[Tensor, ...], items: slice, heads: slice, groups: slice, span: slice) -> Tensor:
        """Return dense rows ``[items, heads, rows, kv_len]``, computed from the last segment to the first."""
        lines, share = parts[0][items, heads, span], (heads.stop - heads.start) // max(1, groups.stop - groups.start)
        keys, recalled = (x[items, groups].repeat_interleave(share, 1) for x in parts[1:])
        begins = self._rows.segments.expand(self.shape[0], -1)[items, None, span, None]
        reading = torch.zeros_like(lines)
        outs = [reading @ keys[:, :, :0].mT]
        for name, written in zip(reversed(self._columns.names), reversed(self._columns.spans), strict=True):
            outs.append(reading @ keys[:, :, written].mT)
            if self._is_delta:
                reading = reading - outs[-1] @ recalled[:, :, written]
            reading = reading + lines * (begins == name)
        return self._columns.of(items).to_token_order(torch.cat(outs[::-1], 3).mT).mT

    def _features(self, x: Tensor, bad: Tensor | None) -> Tensor:
        clean = x if bad is None else x.masked_fill(bad[..., None], 0.0)
        return F.elu(clean.to(wide_dtype(x.dtype))) + 1.0

    def _keys(self, is_open: Tensor | None) -> Tensor:
        """Return the keys to write to the memory, in segment order.

        Keys that are masked, not finite or in a segment that is still open are set to 0.
        """
        features = self._features(self._key, self._tainted)
        for marks in (self._hidden, is_open):
            features = features if marks is None else features.masked_fill(marks[:, None, :, None], 0.0)
        features = features if self._tainted is None else features.masked_fill(self._tainted[..., None], 0.0)
        return self._columns.to_segment_order(features)

    def _clean(self, value: Tensor) -> tuple[Tensor, Tensor | None]:
        """Set non-finite values to 0. Return the result, and which keys make the rows of later segments NaN."""
        nonfinite = nonfinite_tokens(value)
        if nonfinite is None:
            return value, self._bad_keys(self._tainted)
        bad = nonfinite if self._tainted is None else nonfinite | self._tainted
        return value.masked_fill(nonfinite[..., None], 0.0), self._bad_keys(bad)

    def _bad_keys(self, bad: Tensor | None) -> Tensor | None:
        """Return which ``bad`` keys are not masked, bool ``[batch, kv_heads, kv_len]``; None if ``bad`` is None."""
        return None if bad is None else bad & self._visible[:, None]

    @property
    def _visible(self) -> Tensor:
        """The keys that are not masked, bool ``[batch | 1, kv_len]``."""
        is_token = self._columns.segments >= 0
        return is_token if self._hidden is None else is_token & ~self._hidden

    def _nan_rows(self, bad: Tensor | None, memory: Tensor | None, tainted: Tensor | None) -> Tensor | None:
        """Return which rows must be NaN because of their query or an earlier segment, or None if there are none."""
        rows, share, nan = self._rows.segments[:, None], self.shape[1] // max(1, self.kv_heads), []
        if bad is not None:
            nan.append(rows > self._first(bad).repeat_interleave(share, 1)[..., None])
        if tainted is not None:
            nan.append((rows >= 0) & tainted.repeat_interleave(share, 1)[..., None])
        if self._nonfinite_queries is not None:
            sees = rows > self._first(self._visible[:, None])[..., None]
            if memory is not None:
                sees = sees | ((rows >= 0) & (memory[..., -1] != 0).any(-1).repeat_interleave(share, 1)[..., None])
            nan.append(self._nonfinite_queries & sees)
        return functools.reduce(torch.logical_or, nan) if nan else None

    def _first(self, keys: Tensor) -> Tensor:
        """Return the first segment that contains a marked key, for marks ``[batch, groups, kv_len]``.

        If no key is marked, return a number larger than every segment index.
        """
        segments = torch.where(keys, self._columns.segments[:, None], _NO_SEGMENT)
        return F.pad(segments, (0, 1), value=_NO_SEGMENT).amin(-1)


def _normalise(sums: Tensor) -> Tensor:
    """Divide sums that were read from the memory by their last column, the denominator."""
    return divide_rows(sums[..., :-1], sums[..., -1:])


class SegmentLayout(NamedTuple):
    """The layout of queries or keys in a sequence that is sorted by segments.

    If positions are consecutive, tokens stay in order. If not, each segment has the same slots in all items, enough for
    the item with the most tokens in this segment; unused slots stay empty.

    Attributes:
        segments: int64 ``[batch | 1, len]``, the segment of each token; -1 for padding.
        names: the segment indices in ascending order, the same for queries and keys.
        spans: the range of slots of each segment.
        first: number of tokens before the first slot, if tokens stay in order.
        slots: int64 ``[batch | 1, len]``, the slot of each token; all padding shares a slot after the others. None
            if tokens stay in order.
    """

    segments: Tensor
    names: tuple[int, ...]
    spans: tuple[slice, ...]
    first: int = 0
    slots: Tensor | None = None

    @classmethod
    def pair(cls, inputs: Inputs, q: Tensor, kv: Tensor, segment: int) -> tuple[SegmentLayout, SegmentLayout]:
        """Return the segment layouts of queries and keys at positions ``q`` and ``kv``, int64 ``[batch | 1, len]``."""
        tables = [x.div(segment, rounding_mode="floor").clamp(min=-1) for x in (q, kv)]
        starts = [start for start in inputs.starts if start is not None]
        if None not in inputs.starts:
            runs = [range(start, start + length) for start, length in zip(starts, inputs.shape[2:], strict=True)]
            low = max(0, min(run.start for run in runs)) // segment
            ends = range(low, -(-max(0, *(run.stop for run in runs)) // segment))
            return tuple(cls._of_run(*both, ends, segment) for both in zip(tables, runs, strict=True))  # type: ignore[return-value]  # two
        segments = torch.cat([x.flatten() for x in tables]).unique()
        return tuple(cls._of_table(x, segments[segments >= 0]) for x in tables)  # type: ignore[return-value]  # two

    @classmethod
    def _of_run(cls, table: Tensor, run: range, segments: range, segment: int) -> SegmentLayout:
        first = min(max(0, -run.start), len(run))
        edges = [min(max(run.start + first, n * segment), run.stop) for n in (*segments, segments.stop)]
        return cls(table, tuple(segments), _between([edge - run.start - first for edge in edges]), first)

    @classmethod
    def _of_table(cls, table: Tensor, segments: Tensor) -> SegmentLayout:
        (batch, length), count = table.shape, len(segments)
        which = torch.where(table < 0, count, torch.searchsorted(segments, table.clamp(min=0)))
        counts = torch.zeros(batch, count + 1, dtype=torch.int64, device=table.device)
        counts.scatter_add_(1, which, torch.ones_like(which))
        order = which.argsort(dim=1, stable=True)
        rank = torch.arange(length, device=table.device) - (counts.cumsum(1) - counts).gather(1, which.gather(1, order))
        rank = torch.empty_like(rank).scatter_(1, order, rank)
        sizes = counts[:, :count].amax(0) if batch else counts.new_zeros(count)
        edges = F.pad(sizes.cumsum(0), (1, 0))
        slots = torch.where(table < 0, edges[-1], edges[which] + rank)
        return cls(table, tuple(segments.tolist()), _between(edges.tolist()), 0, slots)

    @property
    def size(self) -> int:
        """Number of slots for the tokens of all segments."""
        return self.spans[-1].stop if self.spans else 0

    def of(self, items: slice) -> SegmentLayout:
        """Return the layout of the selected batch items."""
        is_shared = self.slots is None or len(self.slots) == 1
        return self if is_shared else self._replace(slots=self.slots[items])  # type: ignore[index]  # not None here

    def to_segment_order(self, x: Tensor) -> Tensor:
        """Move tokens ``[batch, heads, len, width]`` to segment order, with 0 in empty slots."""
        if self.slots is None:
            return x[:, :, self.first :] if self.first else x
        length = x.shape[2]
        index = torch.full((len(self.slots), self.size + 1), length, device=x.device)
        index = index.scatter_(1, self.slots, torch.arange(length, device=x.device).expand_as(self.slots))
        return take_rows(F.pad(x, (0, 0, 0, 1)), index[:, : self.size])

    def to_token_order(self, x: Tensor) -> Tensor:
        """Move entries from segment order back to token order, ``[batch, heads, len, width]``, with 0 for padding."""
        if self.slots is None:
            return F.pad(x, (0, 0, self.first, 0)) if self.first else x
        return take_rows(F.pad(x, (0, 0, 0, 1)), self.slots)


def _between(edges: list[int]) -> tuple[slice, ...]:
    return tuple(slice(*pair) for pair in itertools.pairwise(edges))
