"""InductionMass: attention to the tokens that followed earlier occurrences of the query's own token."""

from __future__ import annotations

import dataclasses
from functools import cached_property

import torch
from torch import Tensor

from saccade.positions.token_positions import Positions
from saccade.statistics.per_row import PerRow, RowState
from saccade.statistics.row_block import Block, as_slice
from saccade.statistics.statistic import MatrixInfo
from saccade.support.errors import type_error, value_error
from saccade.support.validation import is_integer

_GATHER = 8  # number of comparisons that take as long as one lookup


@dataclasses.dataclass(frozen=True)
class InductionMass(PerRow):
    """Sum of the weights on tokens that followed earlier copies of the query's token, ``[batch, heads, q_len]``.

    Induction heads attend to these tokens: after ``A B … A`` they attend to B, so that the model predicts B again. The
    statistic is 0 in a sequence without repeated tokens.

    Args:
        tokens: token ids of all keys; the queries are the last of these tokens.

    Raises:
        TypeError, ValueError: ``tokens`` is not a tuple with an int for each key, or there are more queries than keys.

    Cost: one operation for each pair of equal tokens, or one comparison per weight if that is less; O(n log n) if few
    tokens repeat. O(q_len) memory in addition to the weights of a block.

    Example: the second "the" and the second "cat" attend to the tokens after the first "the" and "cat".

        >>> from saccade import AttentionMatrix, masks
        >>> x = torch.zeros(1, 1, 5, 4)
        >>> the, cat, sat = range(3)
        >>> AttentionMatrix(x, x, masks.Causal()).compute(InductionMass((the, cat, sat, the, cat)))[0]
        tensor([[[0.0000, 0.0000, 0.0000, 0.2500, 0.2000]]])

    Reference: Olsson et al. 2022, In-context learning and induction heads, arXiv:2209.11895.
    """

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.tokens, tuple) or not all(map(is_integer, self.tokens)):
            hint = "tuple(ids.tolist())"
            raise type_error("tokens", "be a tuple of ints", type(self.tokens).__name__, hint=hint)

    def start(self, info: MatrixInfo) -> RowState:
        _, _, q_len, kv_len = info.shape
        if len(self.tokens) != kv_len:
            raise value_error("tokens", f"be one for each of {kv_len} keys", len(self.tokens))
        if q_len > kv_len > 0:
            raise value_error("queries", "be the last of the keys", f"{q_len} queries and {kv_len} keys")
        return super().start(info)

    @cached_property
    def _tokens(self) -> Tensor:
        return torch.tensor(self.tokens, dtype=torch.int64, device="cpu")

    @cached_property
    def _earlier(self) -> tuple[Tensor, Tensor, Tensor]:
        """Token indices sorted by token id; for each token, the start of its group of equal ids and its rank there."""
        ordered, order = self._tokens.sort(stable=True)
        first = torch.searchsorted(ordered, self._tokens)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(order), device="cpu")
        return order, first, rank - first

    def of_rows(self, block: Block, q: Positions, kv: Positions) -> Tensor:
        last = len(kv) - len(q)
        keys = as_slice(range(block.rows.start + last, block.rows.stop + last, block.rows.step))
        pairs = int(self._earlier[2][keys].sum())
        if pairs * _GATHER > len(block.rows) * block.weights.shape[3]:
            return self._of_all_weights(block, keys, last)
        return self._of_pairs(block, keys)

    def _of_pairs(self, block: Block, rows: slice) -> Tensor:
        """Compute the induction mass from pairs of equal tokens."""
        order, first, count = self._earlier
        first, count = first[rows], count[rows]
        row = torch.arange(len(block.rows), device="cpu").repeat_interleave(count)
        within = torch.arange(len(row), device="cpu") - (count.cumsum(0) - count).repeat_interleave(count)
        device = block.weights.device
        follower = (order[first.repeat_interleave(count) + within] + 1).to(device)
        keys, columns = block.keys.sort()
        index = torch.searchsorted(keys, follower).clamp_max_(len(keys) - 1)
        is_in_block = keys[index] == follower
        row, column = row.to(device)[is_in_block], columns[index[is_in_block]]
        sums = block.weights.new_zeros(block.weights.shape[:3])
        return sums.index_add_(2, row, block.weights[:, :, row, column])

    def _of_all_weights(self, block: Block, rows: slice, last: int) -> Tensor:
        """Compute the induction mass with one comparison for each weight."""
        tokens = self._tokens.to(block.weights.device)
        before = block.keys - 1
        follows = (tokens[before.clamp_min(0)] == tokens[rows][:, None]) & (before >= 0)
        follows &= before < (block.queries + last)[:, None]
        return torch.where(follows, block.weights, 0.0).sum(-1)
