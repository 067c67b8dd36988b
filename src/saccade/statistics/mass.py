"""Mass statistics: attention to the first tokens, to keys at given distances, and to the strongest blocks."""

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

    Trained decoders put surplus attention on the first token. Under a causal mask, the first queries see few other keys
    and put a large weight on the first token in any case, so compare the result with uniform attention, as
    `Matrix.summary` does.

    Args:
        sink_tokens: number of tokens that count as the sink, at positions 0 to ``sink_tokens - 1``.
        positions: positions of the queries and of the keys; when None, the last query is aligned with the last key.

    Raises:
        TypeError, ValueError: ``sink_tokens`` is not an int of at least 1; ``positions`` are invalid.

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

    ``LagMass(0)`` is the weight on the query's own token, and ``LagMass(1)`` is the weight on the previous token.

    Args:
        lag: number of positions before the query; negative for later keys.
        positions: positions of the queries and of the keys; when None, the last query is aligned with the last key.

    Raises:
        TypeError: ``lag`` is not an int; ``positions`` are invalid.

    Cost: reads one weight per row; O(q_len) memory.

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
    """The sum of each query's weights on keys at most ``width`` positions away, ``[batch, heads, q_len]``.

    Args:
        width: the largest distance that counts as near, at least 0; distance 0 is the query's own token.
        positions: positions of the queries and of the keys; when None, the last query is aligned with the last key.

    Raises:
        TypeError, ValueError: ``width`` is not an int of at least 0; ``positions`` are invalid.

    Cost: reads 2 · width + 1 weights per row; O(q_len) memory.
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
    """The attention of each row to the sink, the local window, the anchor blocks and the rest.

    The result is ``[batch, heads, q_len, 4]``, in this order. The four values add up to the row's sum: 1, or less if a
    sink logit takes a share, or 0 if the row attends to nothing. A key that belongs to several parts counts
    only for the first of them. A cache that reads few tokens (`saccade.caches.BlockSelectCache`) reads the first three
    parts and misses the rest.

    Args:
        sink: number of tokens that count as the sink, at positions 0 to ``sink - 1``.
        local: size of the window: the query's own token and all visible tokens less than ``local`` positions away.
        anchor: number of anchor blocks of each query: the blocks with the largest remaining weight.
        block_size: number of tokens in a block; the first block begins at position 0.
        positions: positions of the queries and of the keys; when None, the last query is aligned with the last key.

    Raises:
        TypeError, ValueError: ``sink``, ``local`` or ``anchor`` is not an int of at least 0, ``block_size`` is not an
            int of at least 1, or ``positions`` are invalid.

    Cost: several passes over the weights, a block of rows at a time; O(q_len) memory. A fused pass is not supported.

    Example:
        >>> from saccade import AttentionMatrix, masks
        >>> x = torch.zeros(1, 1, 8, 4)
        >>> AttentionMatrix(x, x, masks.Causal()).compute(Parts(sink=1, local=2, anchor=1, block_size=2))[0][0, 0, -1]
        tensor([0.1250, 0.2500, 0.2500, 0.3750])

    Reference: Xiao et al. 2023, arXiv:2309.17453, section 3.1 (sink and window); Tang et al. 2024, arXiv:2406.10774
    (blocks selected for each query).
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
        # Sum the rest directly instead of subtracting the other parts, so that a share of 0 is exactly 0.
        rest = sums.scatter(-1, strongest.indices + 1, 0.0).sum(-1)
        parts = torch.stack([sink, local, strongest.values.sum(-1), rest], -1)
        return parts.masked_fill(parts.isnan().any(-1, keepdim=True), torch.nan)


def _sum_of_keys(block: Block, keys: range) -> Tensor:
    """Return the attention mass of each row on a range of keys, ``[batch, heads, rows]``."""
    total = block.weights.new_zeros(block.weights.shape[:3])
    for span, weights in block.by_range(block.weights):
        first, stop = (max(0, -((span.start - end) // span.step)) for end in (keys.start, keys.stop))
        if first < min(stop, len(span)):
            total += weights[..., first:stop].sum(-1)
    return total


def _sum_between(block: Block, q: Positions, kv: Positions, least: int, most: int) -> Tensor:
    """Return the attention mass of each row at lags (query minus key position) from ``least`` to ``most``."""
    lead = lead_of(q, kv)
    if lead is None or most - least >= block.weights.shape[-1]:
        row, column = block_positions(block, q, kv)
        is_near = (row - column >= least) & (row - column <= most) & (column >= 0)
        return torch.where(is_near, block.weights, 0.0).sum(-1)
    lags = torch.arange(least, most + 1, device=block.weights.device)
    return block.at_keys(block.queries[:, None] + lead - lags).sum(-1)


def _band(q: Positions, kv: Positions, least: int, most: int) -> Band | None:
    """Return the band of lags from ``least`` to ``most``, for a fused pass; None unless positions are consecutive."""
    lead = lead_of(q, kv)
    return None if lead is None else Band(True, lead - most, lead - least + 1)


def _block_sums(weights: Tensor, blocks: Tensor) -> Tensor:
    """Sum weights ``[batch, heads, rows, columns]`` per block of keys, given block indices ``[batch | 1, columns]``.

    The first sum is for padding, which has negative block indices.
    """
    padding = blocks.new_full((1,), -1)
    distinct, index = torch.cat([padding, blocks.clamp_min(-1).flatten()]).unique(return_inverse=True)
    sums = weights.new_zeros(*weights.shape[:3], len(distinct))
    return sums.scatter_add_(-1, index[1:].view_as(blocks)[:, None, None].expand_as(weights), weights)
