"""Parts: what each query gives to the first tokens, to its neighbours, to the strongest blocks, and to the rest."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from saccade.statistics.fold import Outline
from saccade.statistics.per_row import PerRow, Placing
from saccade.statistics.places import Places
from saccade.statistics.row_block import Block
from saccade.support.validation import check_int

__all__ = ["PARTS", "Parts"]

PARTS = ("sink", "local", "anchor", "rest")


@dataclasses.dataclass(frozen=True)
class Parts(PerRow):
    """Which share of a row goes to the sink, to the local window, to the anchor blocks and to the rest.

    ``[batch, heads, q_len, 4]``, in this order; the four sum to what the row holds: 1, less where a sink logit takes a
    share, 0 in a row that attends to nothing. A key that belongs to several counts for the first of them. These are
    what a cache that reads few tokens reads (`saccade.caches.BlockSelectCache`): what it would miss is the rest.

    Args:
        sink: how many tokens count as first: those at positions 0 to ``sink - 1``.
        local: the window: tokens less than ``local`` away, the query's own included; on both sides, where it sees both.
        anchor: how many blocks count as anchors, query by query: those that get most of what is left.
        block_size: tokens in a block; the first block begins at position 0.
        places: where the tokens stand; bottom-right when None.

    Raises:
        TypeError, ValueError: ``sink``, ``local`` or ``anchor`` is not an int of at least 0, ``block_size`` not one of
            at least 1; ``places`` are none.

    Cost: some passes over the weights, a block of rows at a time; O(q_len) memory. No compiled sweep answers it.

    Example:
        >>> from saccade import AttentionMatrix, masks
        >>> x = torch.zeros(1, 1, 8, 4)
        >>> AttentionMatrix(x, x, masks.Causal()).ask(Parts(sink=1, local=2, anchor=1, block_size=2))[0][0, 0, -1]
        tensor([0.1250, 0.2500, 0.2500, 0.3750])

    Reference: Xiao et al. 2023, arXiv:2309.17453, section 3.1 (sink and window); Tang et al. 2024, arXiv:2406.10774
    (blocks chosen for each query).
    """

    sink: int = 4
    local: int = 16
    anchor: int = 4
    block_size: int = 4
    places: Places | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("sink", "local", "anchor"):
            check_int(name, getattr(self, name), 0)
        check_int("block_size", self.block_size)

    def of_nothing(self, outline: Outline) -> Tensor:
        return torch.zeros(*outline.shape[:3], len(PARTS), dtype=outline.dtype, device=outline.device)

    def of_rows(self, block: Block, placing: Placing) -> Tensor:
        q, kv = placing.places.of_block(block)
        is_sink = (kv >= 0) & (kv < self.sink)
        is_local = ((q - kv).abs() < self.local) & (kv >= self.sink)
        sink, local = (torch.where(own, block.weights, 0.0).sum(-1) for own in (is_sink, is_local))
        left = torch.where(is_sink | is_local, 0.0, block.weights)
        sums = _block_sums(left, kv[:, 0, 0].div(self.block_size, rounding_mode="floor"))
        strongest = sums[..., 1:].topk(min(self.anchor, sums.shape[-1] - 1))
        # What is left is added up, not subtracted: a share of 0 is 0.
        rest = sums.scatter(-1, strongest.indices + 1, 0.0).sum(-1)
        parts = torch.stack([sink, local, strongest.values.sum(-1), rest], -1)
        return parts.masked_fill(parts.isnan().any(-1, keepdim=True), torch.nan)


def _block_sums(weights: Tensor, number: Tensor) -> Tensor:
    """Sums of weights ``[batch, heads, rows, columns]`` by the number of their block, ``[batch | 1, columns]``.

    The first sum is that of keys that are no tokens, with numbers below 0.
    """
    no_token = number.new_full((1,), -1)
    numbers, place = torch.cat([no_token, number.clamp_min(-1).flatten()]).unique(return_inverse=True)
    sums = weights.new_zeros(*weights.shape[:3], len(numbers))
    return sums.scatter_add_(-1, place[1:].view_as(number)[:, None, None].expand_as(weights), weights)
