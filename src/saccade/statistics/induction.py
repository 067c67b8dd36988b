"""InductionMass: how much a query gives to what followed its own token before."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import torch
from torch import Tensor

from saccade.statistics.fold import Outline
from saccade.statistics.per_row import PerRow, Placing, RowState
from saccade.statistics.row_block import Block, as_slice
from saccade.support.errors import type_error, value_error
from saccade.support.validation import is_integer

__all__ = ["InductionMass"]

_GATHER = 8  # weights that are compared in the time in which one is looked up


@dataclasses.dataclass(frozen=True)
class InductionMass(PerRow):
    """What each query gives to what came right after an earlier occurrence of its token, ``[batch, heads, q_len]``.

    Induction heads do that: after ``A B … A`` they look at B, from which the model says B again. Of a text in which
    no token comes twice it is 0.

    Args:
        tokens: ids of all keys' tokens; queries are the last of them.

    Raises:
        TypeError, ValueError: no ints, or not as many as there are keys; more queries than keys.

    Cost: a step for each pair of equal tokens of which one comes before the other, or one comparison per weight where
    that is less: O(n log n) for a text in which hardly any token comes twice. O(q_len) memory beside a block's weights.

    Example: the second "the" and the second "cat" look at what followed the first ones.

        >>> from saccade import AttentionMatrix, masks
        >>> x = torch.zeros(1, 1, 5, 4)
        >>> the, cat, sat = range(3)
        >>> AttentionMatrix(x, x, masks.Causal()).ask(InductionMass((the, cat, sat, the, cat)))[0]
        tensor([[[0.0000, 0.0000, 0.0000, 0.2500, 0.2000]]])

    Reference: Olsson et al. 2022, In-context learning and induction heads, arXiv:2209.11895.
    """

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.tokens, tuple) or not all(map(is_integer, self.tokens)):
            hint = "tuple(ids.tolist())"
            raise type_error("tokens", "be a tuple of ints", type(self.tokens).__name__, hint=hint)

    def start(self, outline: Outline) -> RowState:
        _, _, q_len, kv_len = outline.shape
        if len(self.tokens) != kv_len:
            raise value_error("tokens", f"be one for each of {kv_len} keys", len(self.tokens))
        if q_len > kv_len > 0:
            raise value_error("queries", "be the last of the keys", f"{q_len} beside {kv_len} keys")
        return super().start(outline)

    @cached_property
    def _tokens(self) -> Tensor:
        return torch.tensor(self.tokens, dtype=torch.int64, device="cpu")

    @cached_property
    def _earlier(self) -> tuple[Tensor, Tensor, Tensor]:
        """Positions by token, ascending; for each position, where those of its token begin, and how many are before."""
        ordered, order = self._tokens.sort(stable=True)
        first = torch.searchsorted(ordered, self._tokens)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device="cpu")
        return order, first, place - first

    def of_rows(self, block: Block, placing: Placing) -> Tensor:
        last = placing.places.kv.shape[-1] - placing.places.q.shape[-1]
        own = as_slice(range(block.rows.start + last, block.rows.stop + last, block.rows.step))
        pairs = int(self._earlier[2][own].sum())
        if pairs * _GATHER > len(block.rows) * block.weights.shape[3]:
            return self._of_all_weights(block, own, last)
        return self._of_pairs(block, own)

    def _of_pairs(self, block: Block, own: slice) -> Tensor:
        """The answers, by pairs of equal tokens."""
        order, first, count = self._earlier
        first, count = first[own], count[own]
        rows = torch.arange(len(block.rows), device="cpu").repeat_interleave(count)
        within = torch.arange(len(rows), device="cpu") - (count.cumsum(0) - count).repeat_interleave(count)
        device = block.weights.device
        follower = (order[first.repeat_interleave(count) + within] + 1).to(device)
        keys, columns = block.keys.sort()
        place = torch.searchsorted(keys, follower).clamp_max_(len(keys) - 1)
        is_there = keys[place] == follower
        rows, column = rows.to(device)[is_there], columns[place[is_there]]
        found = block.weights.new_zeros(block.weights.shape[:3])
        return found.index_add_(2, rows, block.weights[:, :, rows, column])

    def _of_all_weights(self, block: Block, own: slice, last: int) -> Tensor:
        """The answers, by a comparison for each weight."""
        tokens = self._tokens.to(block.weights.device)
        before = block.keys - 1
        follows = (tokens[before.clamp_min(0)] == tokens[own][:, None]) & (before >= 0)
        follows &= before < (block.queries + last)[:, None]
        return torch.where(follows, block.weights, 0.0).sum(-1)
