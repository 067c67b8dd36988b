"""How much of a row goes to certain places: the first tokens, a query's own, the one before, its neighbours."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from saccade.statistics.fused_sweep import Band, Quantity
from saccade.statistics.per_row import PerRow, Placing
from saccade.statistics.places import Places
from saccade.statistics.row_block import Block
from saccade.support.validation import check_int

__all__ = ["LagMass", "LocalMass", "SinkMass"]


@dataclasses.dataclass(frozen=True)
class SinkMass(PerRow):
    """What each query gives to the first tokens, ``[batch, heads, q_len]``: the sum of its weights there.

    Trained decoders park attention on the first token that needs nothing. The first queries see little else, under a
    causal mask, and give much to it in any case; compare with uniform attention (`Matrix.summary` does).

    Args:
        sink_tokens: how many tokens count as first: those at positions 0 to ``sink_tokens - 1``.
        places: where the tokens stand; bottom-right when None.

    Raises:
        TypeError, ValueError: ``sink_tokens`` is not an int of at least 1; ``places`` are none.

    Cost: reads the first columns only; O(q_len) memory.

    Reference: Xiao et al. 2023 (StreamingLLM), arXiv:2309.17453, section 3.1.
    """

    sink_tokens: int = 1
    places: Places | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("sink_tokens", self.sink_tokens)

    def of_rows(self, block: Block, placing: Placing) -> Tensor:
        if placing.first is not None:
            first = -placing.first[1]  # the key at position 0
            return _of_keys(block, range(max(0, first), max(0, first + self.sink_tokens)))
        _, kv = placing.places.of_block(block)
        return torch.where((kv >= 0) & (kv < self.sink_tokens), block.weights, 0.0).sum(-1)

    def quantity(self, placing: Placing) -> Quantity | None:
        if placing.first is None:
            return None
        first = -placing.first[1]
        return Band(False, first, first + self.sink_tokens)


@dataclasses.dataclass(frozen=True)
class LagMass(PerRow):
    """What each query gives to the token ``lag`` places before it, ``[batch, heads, q_len]``.

    ``LagMass(0)`` is what a query gives to its own token, ``LagMass(1)`` to the previous one.

    Args:
        lag: how far back; below 0 it is ahead.
        places: where the tokens stand; bottom-right when None.

    Raises:
        TypeError: ``lag`` is not an int; ``places`` are none.

    Cost: reads one weight a row; O(q_len) memory.

    Example:
        >>> from saccade import AttentionMatrix, masks
        >>> x = torch.zeros(1, 1, 4, 4)
        >>> AttentionMatrix(x, x, masks.Causal()).ask(LagMass(1))[0]
        tensor([[[0.0000, 0.5000, 0.3333, 0.2500]]])
    """

    lag: int = 0
    places: Places | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("lag", self.lag, None)

    def of_rows(self, block: Block, placing: Placing) -> Tensor:
        return _between(block, placing, self.lag, self.lag)

    def quantity(self, placing: Placing) -> Quantity | None:
        return _band(placing, self.lag, self.lag)


@dataclasses.dataclass(frozen=True)
class LocalMass(PerRow):
    """What each query gives to the tokens at most ``width`` places away, its own included, ``[batch, heads, q_len]``.

    Args:
        width: the largest distance that is near, at least 0.
        places: where the tokens stand; bottom-right when None.

    Raises:
        TypeError, ValueError: ``width`` is not an int of at least 0; ``places`` are none.

    Cost: reads 2 · width + 1 weights a row; O(q_len) memory.
    """

    width: int = 16
    places: Places | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("width", self.width, 0)

    def of_rows(self, block: Block, placing: Placing) -> Tensor:
        return _between(block, placing, -self.width, self.width)

    def quantity(self, placing: Placing) -> Quantity | None:
        return _band(placing, -self.width, self.width)


def _of_keys(block: Block, keys: range) -> Tensor:
    """Sum of the weights at a range of keys, ``[batch, heads, rows]``."""
    total = block.weights.new_zeros(block.weights.shape[:3])
    for span, weights in block.by_range(block.weights):
        first, stop = (max(0, -((span.start - end) // span.step)) for end in (keys.start, keys.stop))
        if first < min(stop, len(span)):
            total += weights[..., first:stop].sum(-1)
    return total


def _between(block: Block, placing: Placing, least: int, most: int) -> Tensor:
    """Sum of the weights whose lag, query minus key, lies between two bounds."""
    if placing.offset is None or most - least >= block.weights.shape[-1]:
        q, kv = placing.places.of_block(block)
        is_near = (q - kv >= least) & (q - kv <= most) & (kv >= 0)
        return torch.where(is_near, block.weights, 0.0).sum(-1)
    lags = torch.arange(least, most + 1, device=block.weights.device)
    return block.at_keys(block.queries[:, None] + placing.offset - lags).sum(-1)


def _band(placing: Placing, least: int, most: int) -> Band | None:
    """Keys whose lag lies between two bounds."""
    return None if placing.offset is None else Band(True, placing.offset - most, placing.offset - least + 1)
