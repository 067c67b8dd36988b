"""Prefix sums in linear time, chunk by chunk: all pairs within a chunk of tokens, and one state for earlier tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.engine.tiles.grouped_heads import folded

CHUNK = 64
"""Number of tokens per chunk. All pairs in a chunk are computed: large chunks mean more pairs and fewer steps."""

_FLOOR = -1e30  # below every log weight, and finite, so that the difference of two of these is 0 and not NaN


class PairWeights(NamedTuple):
    r"""The weights of earlier keys in each row's sum, :math:`w_{ij} = e^{s_j - r_i} \le 1`, and the segments of rows.

    Attributes:
        row_logs: r, ``[batch, groups, len]``, at least as large as s for every key in the row's sum. Both logs are
            None if they are 0.
        key_logs: s, ``[batch, groups, len]``; -inf for a key that is in no row's sum.
        segments: int64 ``[batch | 1, len]``, the segment of each token; a row sums only over keys in its own segment.
    """

    row_logs: Tensor | None = None
    key_logs: Tensor | None = None
    segments: Tensor | None = None

    def transposed(self) -> PairWeights:
        """Return the weights of the transposed prefix sum: rows and keys are swapped, and the order is reversed."""
        if self.row_logs is None or self.key_logs is None:
            return self
        return PairWeights(-self.key_logs, -self.row_logs, self.segments)

    def at(self, part: slice) -> PairWeights:
        """Return the weights and segments of a range of tokens."""
        return PairWeights(*(None if x is None else x[..., part] for x in self))


class Summed(NamedTuple):
    """The result of chunked prefix sums, and the state from which later tokens continue.

    Attributes:
        out: the sums.
        state: ``[batch, groups, width, value_dim]``, the sum over all keys so far. It is overwritten when later tokens
            continue from it.
        carried: the scale and segment of the state.
    """

    out: Tensor
    state: Tensor
    carried: Carried


def chunked_sums(
    a: Tensor, b: Tensor, c: Tensor, pair_weights: PairWeights, *, reverse: bool = False, before: Summed | None = None
) -> Summed:
    """Compute `prefix_sums` chunk by chunk, starting from the result for earlier tokens. It is not differentiable."""
    batch, heads, length, width = a.shape
    groups = min(heads, b.shape[1])
    out = a.new_empty(batch, heads, length, c.shape[3])
    state = a.new_zeros(batch, groups, width, c.shape[3]) if before is None else before.state
    is_even = pair_weights.key_logs is None and pair_weights.segments is None
    carried = Carried.nothing(batch, groups, a) if before is None else before.carried
    starts = range(0, length, CHUNK)
    for start in reversed(starts) if reverse else starts:
        part = slice(start, min(start + CHUNK, length))
        size = part.stop - part.start
        # Fold the heads of a group into the rows of all three tensors.
        rows, keys, brought = (folded(x[:, :, part], groups) for x in (a, b, c))
        scores = rows @ keys.mT
        if is_even:
            chunk = (rows @ state).add_(_zero_later_keys(scores, size, reverse) @ brought)
            state.add_(keys.mT @ brought)
        else:
            weights_of_chunk = pair_weights.at(part)
            scores = _multiply_pairs(scores, size, _weights_in_chunk(weights_of_chunk, reverse)[:, :, None, :, None])
            chunk = _scaled(rows @ state, carried.share_of(weights_of_chunk)).add_(scores @ brought)
            state, carried = carried.advanced(state, keys, brought, weights_of_chunk, last=0 if reverse else size - 1)
        out[:, :, part] = chunk.reshape(batch, heads, size, -1)
    return Summed(out, state, carried)


class Carried(NamedTuple):
    """The scale and segment of the state that is carried from chunk to chunk.

    The state sums ``exp(s_j - peak) * b_j c_j^T`` over the keys j of one segment.

    Attributes:
        peak: ``[batch, groups]``, at least as large as every s in the state.
        segment: int64 ``[batch | 1]``; None before the first key, or if there are no segments.
    """

    peak: Tensor
    segment: Tensor | None

    @classmethod
    def nothing(cls, batch: int, groups: int, like: Tensor) -> Carried:
        """Return the scale of the empty state before the first chunk of a prefix sum."""
        return cls(like.new_full((batch, groups), _FLOOR), None)

    def share_of(self, pair_weights: PairWeights) -> Tensor:
        """Return the weight of the carried state for each row of the next chunk, ``[batch | 1, groups | 1, len]``."""
        logs = torch.zeros_like(self.peak)[..., None]
        if pair_weights.row_logs is not None:
            logs = self.peak[..., None] - pair_weights.row_logs
        if pair_weights.segments is not None and self.segment is not None:
            is_other = (pair_weights.segments != self.segment[:, None])[:, None]
            logs = logs.masked_fill(is_other, -torch.inf)  # before exp, which may overflow there
        return logs.exp()

    def advanced(
        self, state: Tensor, keys: Tensor, brought: Tensor, pair_weights: PairWeights, *, last: int
    ) -> tuple[Tensor, Carried]:
        """Return the state and its scale after another chunk of keys. ``last`` is the index of its last key."""
        segment, peak, take, keep = self.segment, self.peak, torch.ones_like(self.peak)[..., None], None
        logs = pair_weights.key_logs
        if pair_weights.segments is not None:
            segment = pair_weights.segments[:, last]
            is_own = (pair_weights.segments == segment[:, None])[:, None]
            take = take * is_own
            logs = None if logs is None else logs.masked_fill(~is_own, -torch.inf)
            if self.segment is not None:
                keep = (self.segment == segment)[:, None]
                peak = peak.masked_fill(~keep, _FLOOR)
        if logs is not None:
            old, peak = peak, torch.maximum(peak, logs.amax(-1))
            take = (logs - peak[..., None]).exp()
            keep = (old - peak).exp() if keep is None else (old - peak).exp() * keep
        state = state if keep is None else state * keep[..., None, None]
        return state + _scaled(keys, take).mT @ brought, Carried(peak, segment)


def _zero_later_keys(scores: Tensor, size: int, reverse: bool) -> Tensor:
    """Set the scores in each row of a chunk to 0 at all keys that come later in the prefix sum."""
    if scores.shape[2:] == (size, size):
        return scores.triu_() if reverse else scores.tril_()
    pairs = scores.new_ones(size, size)
    return _multiply_pairs(scores, size, (pairs.triu_() if reverse else pairs.tril_())[:, None])


def _weights_in_chunk(pair_weights: PairWeights, reverse: bool) -> Tensor:
    """Return each key's weight for each row of a chunk, ``[batch | 1, groups | 1, len, len]``, or 0 for later keys."""
    weights: Tensor | int = 1
    if pair_weights.row_logs is not None and pair_weights.key_logs is not None:
        weights = (pair_weights.key_logs[:, :, None] - pair_weights.row_logs[..., None]).clamp_(max=0.0).exp_()
    if pair_weights.segments is not None:
        weights = weights * (pair_weights.segments[:, :, None] == pair_weights.segments[:, None])[:, None]
    assert isinstance(weights, Tensor)  # the caller passes logs or segments
    return weights.triu() if reverse else weights.tril()


def _multiply_pairs(scores: Tensor, size: int, weights: Tensor) -> Tensor:
    """Multiply a chunk's scores, ``[batch, groups, heads * size, others * size]``, by weights that all heads share."""
    batch, groups, rows, columns = scores.shape
    pairs = scores.view(batch, groups, rows // size, size, columns // size, size)
    return (pairs * weights).view(scores.shape)


def _scaled(rows: Tensor, factors: Tensor) -> Tensor:
    """Multiply rows of a chunk, ``[batch, groups, heads * size, width]``, by one factor for each token."""
    batch, groups, _, width = rows.shape
    if factors.shape[2] == 1:
        return rows * factors[..., None]
    return (rows.view(batch, groups, -1, factors.shape[2], width) * factors[:, :, None, :, None]).view(rows.shape)
