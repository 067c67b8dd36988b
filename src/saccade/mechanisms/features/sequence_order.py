"""The order that merges queries and keys into one sequence, so that prefix sums run over the keys before each row."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.caches.recurrent import Memory
from saccade.matrix import Matrix
from saccade.mechanisms.features.chunked_sums import PairWeights
from saccade.mechanisms.features.mask_support import Visible
from saccade.mechanisms.linear_time import take_rows
from saccade.mechanisms.readable_tensors import is_readable
from saccade.support.errors import unsupported, value_error


class Order(NamedTuple):
    """The order of queries and keys in the merged sequence that `prefix_sums` sums over.

    Most masks need no sorting: query i shares an index with key ``i + past``. In all other cases, queries and keys have
    separate indices, sorted by document, then by position if the mask is causal, with keys before queries.

    Attributes:
        past: number of keys before the first query.
        kv_len: number of all keys.
        length: length of the merged sequence.
        segments: int64 ``[batch | 1, length]``, the document of each entry; None if there is only one.
        order: int64 ``[batch | 1, length]``, the source of each entry: an index into all keys followed by all queries.
            None if queries and keys share indices.
    """

    past: int
    kv_len: int
    length: int
    segments: Tensor | None
    order: Tensor | None

    @property
    def is_sorted(self) -> bool:
        """Whether queries and keys have separate indices in the merged sequence."""
        return self.order is not None

    @classmethod
    def of(cls, visible: Visible, q_len: int, kv_len: int) -> Order:
        """Return the order of queries and keys for a mask that is causal or has documents; sort only if necessary."""
        past = visible.offset
        if visible.causal and past is not None and 0 <= past <= kv_len - q_len:
            length, documents = past + q_len, visible.kv_documents
            return cls(past, kv_len, length, None if documents is None else documents[:, :length], None)
        size = max(len(visible.q_positions), len(visible.kv_positions))
        order = torch.arange(q_len + kv_len, device=visible.q_positions.device).expand(size, -1)
        if visible.causal:
            positions = torch.cat([x.expand(size, -1) for x in (visible.kv_positions, visible.q_positions)], 1)
            order = positions.argsort(dim=1, stable=True)  # keys stay before queries with the same position
        segments = None
        if visible.kv_documents is not None and visible.q_documents is not None:
            size = max(size, len(visible.kv_documents))
            order = order.expand(size, -1)
            segments = torch.cat([x.expand(size, -1) for x in (visible.kv_documents, visible.q_documents)], 1)
            segments = segments.gather(1, order)
            by_segment = segments.argsort(dim=1, stable=True)
            segments, order = segments.gather(1, by_segment), order.gather(1, by_segment)
        return cls(0, kv_len, q_len + kv_len, segments, order)

    def with_rows(self, x: Tensor) -> Tensor:
        """Return rows ``[batch, heads, q_len, width]`` in merged order, with 0 at indices without a query."""
        if self.order is None:
            return F.pad(x, (0, 0, self.past, 0)) if self.past else x
        return take_rows(F.pad(x, (0, 0, self.kv_len, 0)), self.order)

    def with_keys(self, x: Tensor) -> Tensor:
        """Return keys ``[batch, groups, kv_len, width]`` in merged order, with 0 at indices without a key."""
        if self.order is None:
            return x if self.length == self.kv_len else x[:, :, : self.length]
        return take_rows(F.pad(x, (0, 0, 0, self.length - self.kv_len)), self.order)

    def rows_of(self, x: Tensor) -> Tensor:
        """Return the entries of the merged sequence that belong to queries, ``[batch, heads, q_len, width]``."""
        if self.order is None:
            return x[:, :, self.past :]
        return take_rows(x, self.order.argsort(1)[:, self.kv_len :])

    def keys_of(self, x: Tensor) -> Tensor:
        """Return the entries of the merged sequence that belong to keys, and 0 for keys that are not part of it."""
        if self.order is None:
            return F.pad(x, (0, 0, 0, self.kv_len - self.length))
        return take_rows(x, self.order.argsort(1)[:, : self.kv_len])

    def rows_after(self, marks: Tensor) -> Tensor:
        """Return which rows follow a marked key in the merged sequence, bool ``[batch, groups, q_len]``."""
        indices = torch.arange(self.length, device=marks.device)
        marked = self.with_keys(marks[..., None])[..., 0]
        last = torch.where(marked, indices, -1).cummax(-1).values
        first = torch.zeros_like(indices)
        if self.segments is not None:
            is_new = self.segments[:, 1:] != self.segments[:, :-1]
            first = F.pad(is_new * indices[1:], (1, 0)).cummax(-1).values[:, None]
        return self.rows_of((last >= first)[..., None])[..., 0]

    def pair_weights(self, logs: Tensor | None) -> PairWeights:
        """Return the weights and segments of the prefix sum for key logs ``[batch, groups, kv_len]``."""
        if logs is not None and self.order is None:
            logs = logs[..., : self.length]
        elif logs is not None and self.order is not None:
            logs = F.pad(logs, (0, self.length - self.kv_len), value=-torch.inf)
            logs = take_rows(logs[..., None], self.order)[..., 0]
        return pair_weights_of(logs, self.segments)


def pair_weights_of(logs: Tensor | None, segments: Tensor | None, floor: Tensor | None = None) -> PairWeights:
    """Return the weights of keys in a prefix sum, divided in each row by the largest weight so far.

    Later keys do not affect this division, so they cannot change the rounding of earlier rows.

    Args:
        logs: ``[batch, groups, len]``; -inf for a key that is in no row's sum.
        segments: int64 ``[batch | 1, len]``, non-decreasing; the largest weight is taken within each segment.
        floor: ``[batch | 1, groups, len]``, the largest logs of earlier calls.
    """
    if logs is None:
        return PairWeights(segments=segments)
    if segments is None or not logs.numel():
        peak = logs.cummax(-1).values
    else:
        # Offset the segments, so that a cumulative maximum never comes from another segment.
        wide, finite = logs.double(), logs.isfinite()
        low = wide.masked_fill(~finite, torch.inf).amin()
        low = low.masked_fill(low == torch.inf, 0.0)  # if no token has a finite log
        step = (wide.masked_fill(~finite, -torch.inf).amax() - low).clamp(min=0.0) + 1.0
        lift = segments[:, None] * step
        lifted = torch.where(finite, wide - low, -0.5) + lift
        peak = lifted.cummax(-1).values - lift
        peak = torch.where(peak < -0.25, -torch.inf, peak + low).to(logs.dtype)
    peak = peak if floor is None else torch.maximum(peak, floor)
    return PairWeights(peak.masked_fill(peak == -torch.inf, 0.0), logs, segments)


def rows_that_see(matrix: Matrix, order: Order | None, visible: Visible, keys: Tensor) -> Tensor:
    """Return which rows may attend to at least one marked key, bool ``[batch, heads, q_len]``, in linear time."""
    if visible.hidden_keys is not None:
        keys = keys & ~visible.hidden_keys[:, None]
    rows = keys.any(-1, keepdim=True).expand(-1, -1, matrix.shape[2]) if order is None else order.rows_after(keys)
    rows = rows.repeat_interleave(matrix.shape[1] // max(1, rows.shape[1]), 1)
    return rows if visible.hidden_rows is None else rows & ~visible.hidden_rows[:, None]


def check_in_order(visible: Visible, q_len: int, kv_len: int) -> None:
    """Raise an error unless a recurrence can run in the given order: keys sorted by position, queries last.

    Raises:
        UnsupportedError: it cannot, or the positions cannot be read.
    """
    if not Order.of(visible, q_len, kv_len).is_sorted:
        return
    if is_readable(visible.q_positions, visible.kv_positions):
        reason, hint = (
            (
                "a state depends on the order of its tokens, so keys must be "
                "in order, and queries must belong to the last of them"
            ),
            "sort the tokens, or use a mechanism without a state",
        )
    else:
        reason, hint = "the order of tokens follows from positions whose values cannot be read here", "pass a range"
    raise unsupported("positions", [reason], hint=hint)


class Continued(Protocol):
    """The interface of a linear-time matrix that continues from the recurrent state of earlier tokens."""

    shape: tuple[int, int, int, int]
    source: Hashable


def check_memory(
    matrix: Continued, order: Order | None, visible: Visible, memory: Memory | None, sizes: tuple[int, int]
) -> None:
    """Raise an error unless new tokens can continue from a recurrent state of shape ``sizes`` per head."""
    if not visible.causal:
        hint = "combine it with masks.Causal(), or use a KVCache, which stores the tokens themselves"
        rule = "be causal: a state sums over earlier tokens"
        raise value_error("mask", rule, visible.rule, hint=hint)
    check_in_order(visible, *matrix.shape[2:])
    if order is None or order.past or matrix.shape[2] != matrix.shape[3]:
        raise value_error("positions", "be those of the keys, in order", "other positions")
    if memory is None:
        return
    if memory.source not in (None, matrix.source) or memory.state.shape[2:] != sizes:
        hint = "new features were drawn, or the mechanism is a different one; a memory is valid for one set of features"
        raise value_error("features", "be those of the memory", "other features", hint=hint)
    if (memory.segment is None) != (visible.kv_documents is None):
        raise value_error("mask", "be the mask of earlier calls", visible.rule)
