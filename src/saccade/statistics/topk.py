"""TopK: the keys with the largest weights of each query."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.statistics.row_block import Block, as_slice
from saccade.statistics.statistic import MatrixInfo, Statistic
from saccade.support.validation import check_int

_FEWEST_SHARES = 8  # with fewer shares, use torch.topk on the whole row


class Strongest(NamedTuple):
    """Result of `TopK`: the keys with the largest weights of each query, largest first.

    Attributes:
        weights: ``[batch, heads, q_len, k]``; 0 where there is no further key.
        indices: indices of the keys, int64 ``[batch, heads, q_len, k]``; -1 where there is no further key.
    """

    weights: Tensor
    indices: Tensor


@dataclasses.dataclass(frozen=True)
class TopK(Statistic[Strongest, Strongest]):
    """The ``k`` largest weights of each row and the corresponding keys, as `Strongest`.

    Only weights above 0 count (for scores, those above -inf). If a query attends to fewer than k keys, the remaining
    entries have weight 0 and index -1. Equal weights may be in any order. A NaN row has NaN weights and index -1.

    Args:
        k: number of weights per row, at least 1; may exceed the number of keys.

    Raises:
        TypeError, ValueError: ``k`` is not an int of at least 1.

    Cost: about one pass over the weights; O(q_len * k) memory.

    Example:
        >>> from saccade import AttentionMatrix, masks
        >>> x = 4.0 * torch.eye(3)[None, None]
        >>> strongest = AttentionMatrix(x, x, masks.Causal()).topk(2)
        >>> strongest.indices[0, 0, 0].tolist(), strongest.indices[0, 0, 2, 0].item()
        ([0, -1], 2)
    """

    k: int

    def __post_init__(self) -> None:
        check_int("k", self.k)

    def start(self, info: MatrixInfo) -> Strongest:
        shape = (*info.shape[:3], self.k)
        weights = torch.full(shape, info.hidden, dtype=info.dtype, device=info.device)
        return Strongest(weights, torch.full(shape, -1, dtype=torch.int64, device=info.device))

    def add(self, state: Strongest, block: Block) -> Strongest:
        weights, places = _largest(block.weights, min(self.k, block.weights.shape[-1]))
        indices = torch.where(weights > block.hidden, block.keys[places], -1)
        where = (block.batch, block.heads, as_slice(block.rows), slice(0, weights.shape[-1]))
        state.weights[where] = weights.clamp_min(block.hidden)
        state.indices[where] = indices
        return state

    def merge(self, state: Strongest, other: Strongest) -> Strongest:
        theirs = (other.indices >= 0) | other.weights.isnan()
        weights = torch.where(theirs, other.weights, state.weights)
        return Strongest(weights, torch.where(theirs, other.indices, state.indices))

    def finish(self, state: Strongest) -> Strongest:
        return state


def _largest(weights: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the largest weights of each row, like ``torch.topk``, but faster for wide rows.

    Wide rows are reshaped to ``[shares, width]``. Each of the k largest weights is in one of the k columns with the
    largest maxima over the shares, and computing maxima is far cheaper than selecting the k largest.
    """
    columns = weights.shape[-1]
    shares = math.isqrt(columns // k)  # makes the two selections about equally wide
    if shares < _FEWEST_SHARES:
        return weights.topk(k, -1)
    width = columns // shares
    covered = shares * width
    best = weights[..., :covered].unflatten(-1, (shares, width)).amax(-2).topk(k, -1, sorted=False).indices
    starts = torch.arange(0, covered, width, device=weights.device)
    rest = torch.arange(covered, columns, device=weights.device).expand(*weights.shape[:-1], -1)
    candidates = torch.cat([(best[..., None] + starts).flatten(-2), rest], -1)
    largest, chosen = weights.gather(-1, candidates).topk(k, -1)
    return largest, candidates.gather(-1, chosen)
