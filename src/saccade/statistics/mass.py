"""Mass statistics: how much of a row goes to the first tokens, to a distance, to the strongest blocks, to the rest."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from saccade.engine.kernels.native_statistics import Band
from saccade.positions.token_positions import Positions
from saccade.statistics.per_row import PerRow, PositionPair, block_positions, lead_of
from saccade.statistics.row_block import Block
from saccade.statistics.statistic import MatrixInfo, Quantity
from saccade.support.validation import check_int

PARTS = ("sink", "local", "anchor", "rest")


@dataclasses.dataclass(frozen=True)
class SinkMass(PerRow):
    """The sum of each query's weights on the first tokens, ``[batch, heads, q_len]``.

    Trained decoders put attention that they do not need on the first token. Under a causal mask the first queries see
    little else and give much to it in any case; compare with uniform attention (`Matrix.summary` does).

    Args:
        sink_tokens: number of first tokens: those at positions 0 to ``sink_tokens - 1``.
        positions: of queries and keys, a pair; bottom-right when None.

    Raises:
        TypeError, ValueError: ``sink_tokens`` is not an int of at least 1; ``positions`` are not valid.

    Cost: reads the first columns only; O(q_len) memory.

    Reference: Xiao et al. 2023 (StreamingLLM), arXiv:2309.17453, section 3.1.
    """

    sink_tokens: int = 1
    positions: PositionPair | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("sink_tokens", self.sink_tokens)

    def of_rows(self, block: Block, q: Positions, kv: Positions) -> Tensor:
        if kv.first is not None:
            first = -kv.first  # the key at position 0
            return _sum_of_keys(block, range(max(0, first), max(0, first + self.sink_tokens)))
        _, at = block_positions(block, q, kv)
        return torch.where((at >= 0) & (at < self.sink_tokens), block.weights, 0.0).sum(-1)

    def quantity(self, q: Positions, kv: Positions) -> Quantity | None:
        return None if kv.first is None else Band(False, -kv.first, self.sink_tokens - kv.first)


@dataclasses.dataclass(frozen=True)
class LagMass(PerRow):
    """Each query's weight on the token ``lag`` positions before it, ``[batch, heads, q_len]``.

    ``LagMass(0)`` is the weight on the query's own token, ``LagMass(1)`` on the previous one.

    Args:
        lag: number of positions back; below 0 it is ahead.
        positions: of queries and keys, a pair; bottom-right when None.

    Raises:
        TypeError: ``lag`` is not an int; ``positions`` are not valid.

    Cost: reads one weight a row; O(q_len) memory.

    Example:
        >>> from saccade import AttentionMatrix, masks
        >>> x = torch.zeros(1, 1, 4, 4)
        >>> AttentionMatrix(x, x, masks.Causal()).compute(LagMass(1))[0]
        tensor([[[0.0000, 0.5000, 0.3333, 0.2500]]])
    """

    lag: int = 0
    positions: PositionPair | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("lag", self.lag, None)

    def of_rows(self, block: Block, q: Positions, kv: Positions) -> Tensor:
        return _sum_between(block, q, kv, self.lag, self.lag)

    def quantity(self, q: Positions, kv: Positions) -> Quantity | None:
        return _band(q, kv, self.lag, self.lag)


@dataclasses.dataclass(frozen=True)
class LocalMass(PerRow):
    """The sum of each query's weights at most ``width`` positions away, itself included, ``[batch, heads, q_len]``.

    Args:
        width: the largest distance that counts as near, at least 0.
        positions: of queries and keys, a pair; bottom-right when None.

    Raises:
        TypeError, ValueError: ``width`` is not an int of at least 0; ``positions`` are not valid.

    Cost: reads 2 · width + 1 weights a row; O(q_len) memory.
    """

    width: int = 16
    positions: PositionPair | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("width", self.width, 0)

    def of_rows(self, block: Block, q: Positions, kv: Positions) -> Tensor:
        return _sum_between(block, q, kv, -self.width, self.width)

    def quantity(self, q: Positions, kv: Positions) -> Quantity | None:
        return _band(q, kv, -self.width, self.width)


@dataclasses.dataclass(frozen=True)
class Parts(PerRow):
    """The shares of a row's mass in the sink, the local window, the anchor blocks and the rest.

    ``[batch, heads, q_len, 4]``, in this order; the four sum to the sum of the row: 1, less if a sink logit takes a
    share, 0 in a row that attends to nothing. A key that belongs to several counts for the first of them. The first
    three are what a cache that reads few tokens reads (`saccade.caches.BlockSelectCache`); the rest is what it misses.

    Args:
        sink: number of first tokens: those at positions 0 to ``sink - 1``.
        local: the window: tokens less than ``local`` away, the query's own included; on both sides, if it sees both.
        anchor: number of anchor blocks of each query: those that get most of what remains.
        block_size: tokens in a block; the first block begins at position 0.
        positions: of queries and keys, a pair; bottom-right when None.

    Raises:
        TypeError, ValueError: ``sink``, ``local`` or ``anchor`` is not an int of at least 0, ``block_size`` not one of
            at least 1; ``positions`` are not valid.

    Cost: some passes over the weights, a block of rows at a time; O(q_len) memory. No fused sweep computes it.

    Example:
        >>> from saccade import AttentionMatrix, masks
        >>> x = torch.zeros(1, 1, 8, 4)
        >>> AttentionMatrix(x, x, masks.Causal()).compute(Parts(sink=1, local=2, anchor=1, block_size=2))[0][0, 0, -1]
        tensor([0.1250, 0.2500, 0.2500, 0.3750])

    Reference: Xiao et al. 2023, arXiv:2309.17453, section 3.1 (sink and window); Tang et al. 2024, arXiv:2406.10774
    (blocks chosen for each query).
    """

    sink: int = 4
    local: int = 16
    anchor: int = 4
    block_size: int = 4
    positions: PositionPair | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sink", "local", "anchor"):
            check_int(name, getattr(self, name), 0)
        check_int("block_size", self.block_size)

    def of_nothing(self, info: MatrixInfo) -> Tensor:
        return torch.zeros(*info.shape[:3], len(PARTS), dtype=info.dtype, device=info.device)

    def of_rows(self, block: Block, q: Positions, kv: Positions) -> Tensor:
        row, column = block_positions(block, q, kv)
        is_sink = (column >= 0) & (column < self.sink)
        is_local = ((row - column).abs() < self.local) & (column >= self.sink)
        sink, local = (torch.where(part, block.weights, 0.0).sum(-1) for part in (is_sink, is_local))
        others = torch.where(is_sink | is_local, 0.0, block.weights)
        sums = _block_sums(others, column[:, 0, 0].div(self.block_size, rounding_mode="floor"))
        strongest = sums[..., 1:].topk(min(self.anchor, sums.shape[-1] - 1))
        # The rest is added up, not subtracted, so that a share of 0 is exactly 0.
        rest = sums.scatter(-1, strongest.indices + 1, 0.0).sum(-1)
        parts = torch.stack([sink, local, strongest.values.sum(-1), rest], -1)
        return parts.masked_fill(parts.isnan().any(-1, keepdim=True), torch.nan)


def _sum_of_keys(block: Block, keys: range) -> Tensor:
    """Return the sum of the weights at a range of keys, ``[batch, heads, rows]``."""
    total = block.weights.new_zeros(block.weights.shape[:3])
    for span, weights in block.by_range(block.weights):
        first, stop = (max(0, -((span.start - end) // span.step)) for end in (keys.start, keys.stop))
        if first < min(stop, len(span)):
            total += weights[..., first:stop].sum(-1)
    return total


def _sum_between(block: Block, q: Positions, kv: Positions, least: int, most: int) -> Tensor:
    """Return the sum of the weights whose lag, query minus key, is between two bounds."""
    lead = lead_of(q, kv)
    if lead is None or most - least >= block.weights.shape[-1]:
        row, column = block_positions(block, q, kv)
        is_near = (row - column >= least) & (row - column <= most) & (column >= 0)
        return torch.where(is_near, block.weights, 0.0).sum(-1)
    lags = torch.arange(least, most + 1, device=block.weights.device)
    return block.at_keys(block.queries[:, None] + lead - lags).sum(-1)


def _band(q: Positions, kv: Positions, least: int, most: int) -> Band | None:
    """Return the band of keys whose lag is between two bounds."""
    lead = lead_of(q, kv)
    return None if lead is None else Band(True, lead - most, lead - least + 1)


def _block_sums(weights: Tensor, number: Tensor) -> Tensor:
    """Return sums of weights ``[batch, heads, rows, columns]`` per block, by block numbers ``[batch | 1, columns]``.

    The first sum is that of padding, with numbers below 0.
    """
    padding = number.new_full((1,), -1)
    numbers, index = torch.cat([padding, number.clamp_min(-1).flatten()]).unique(return_inverse=True)
    sums = weights.new_zeros(*weights.shape[:3], len(numbers))
    return sums.scatter_add_(-1, index[1:].view_as(number)[:, None, None].expand_as(weights), weights)
