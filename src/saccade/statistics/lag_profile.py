"""LagProfile: how much attention goes to each distance."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.statistics.fold import Fold, Outline
from saccade.statistics.per_row import Placing, check_places
from saccade.statistics.places import Places
from saccade.statistics.row_block import Block

__all__ = ["LagProfile", "Lags"]


class Lags(NamedTuple):
    """Attention by distance.

    Attributes:
        lags: positions of queries minus those of keys, int64 ``[lags]``, ascending: 0 is a query's own token, 1 the
            one before it.
        sums: attention that goes there from all queries, ``[batch, heads, lags]``, in whole queries.
    """

    lags: Tensor
    sums: Tensor


class _State(NamedTuple):
    sums: Tensor
    least: int
    placing: Placing
    outline: Outline


@dataclasses.dataclass(frozen=True)
class LagProfile(Fold[_State, Lags]):
    r"""Sum of the weights on each diagonal, as `Lags`: what goes to a query's own token, to the one before, and so on.

    .. math:: \ell_\delta = \sum_i A_{i, j}, \quad p_i - p_j = \delta

    A peak at 1 is a previous-token head; equally high peaks at several lags are a pattern; a slope is a habit of
    looking near. All lags together are the number of queries that attend to something.

    Args:
        places: where the tokens stand; bottom-right when None.

    Raises:
        TypeError: ``places`` are none.

    Cost: one copy of the weights and one addition each; O(q_len + kv_len) memory (with `places`, O(the range of
    positions)); sums are kept in float64.

    Example:
        >>> from saccade import AttentionMatrix, masks
        >>> x = torch.zeros(1, 1, 3, 4)
        >>> profile = AttentionMatrix(x, x, masks.Causal()).ask(LagProfile())[0]
        >>> profile.lags.tolist(), profile.sums[0, 0]
        ([-2, -1, 0, 1, 2], tensor([0.0000, 0.0000, 1.8333, 0.8333, 0.3333]))
    """

    places: Places | None = None

    def __post_init__(self) -> None:
        check_places(self.places)

    def start(self, outline: Outline) -> _State:
        batch, heads, q_len, kv_len = outline.shape
        placing = Placing.of(self.places, outline)
        places = placing.places
        least, most = 0, -1
        if q_len and kv_len:
            kv = places.kv[places.kv >= 0] if placing.offset is None else places.kv
            q = places.q[places.q >= 0] if placing.offset is None else places.q
            if q.numel() and kv.numel():
                least, most = int(q.min() - kv.max()), int(q.max() - kv.min())
        sums = torch.zeros(batch, heads, most - least + 1, dtype=outline.sum_dtype, device=outline.device)
        return _State(sums, least, placing, outline)

    def add(self, state: _State, block: Block) -> _State:
        own = state.sums[block.batch, block.heads]
        if not own.shape[-1]:  # no query or no key is a token: there are no lags, and all weights are 0
            return state
        offset = state.placing.offset
        if offset is None:
            self._scatter(state, block, own)
            return state
        for span, weights in block.by_range(block.weights):
            if span.step != block.rows.step:
                self._scatter(state, block._replace(columns=(span,), weights=weights, log_weights=None), own)
                continue
            # Lags of the first row are those at which the sums of the first row's diagonals begin.
            sums = _diagonals(weights)  # key place minus row place, from -(rows - 1) on
            first = block.rows.start + offset - span.start + (len(block.rows) - 1) * span.step - state.least
            last = first - (sums.shape[-1] - 1) * span.step
            own[..., last : first + 1 : span.step] += sums.flip(-1)
        return state

    @staticmethod
    def _scatter(state: _State, block: Block, own: Tensor) -> None:
        q, kv = state.placing.places.of_block(block)
        q, kv = torch.broadcast_tensors(q, kv)
        lags = (q - kv - state.least).clamp(0, own.shape[-1] - 1)  # weights of what is no token are 0
        lags = lags.expand(block.weights.shape)
        own.scatter_add_(-1, lags.flatten(-2), block.weights.flatten(-2).to(own.dtype))

    def merge(self, state: _State, other: _State) -> _State:
        return state._replace(sums=state.sums + other.sums)

    def finish(self, state: _State) -> Lags:
        lags = torch.arange(state.least, state.least + state.sums.shape[-1], device=state.sums.device)
        return Lags(lags, state.sums.to(state.outline.dtype))


def _diagonals(weights: Tensor) -> Tensor:
    """Sums along the diagonals, ``[batch, heads, rows + columns - 1]``, that of the lower left corner first."""
    batch, heads, rows, columns = weights.shape
    pitch = rows + columns
    # In a row-major copy with room between the rows, a stride that is longer by one runs along the diagonals.
    roomy = F.pad(weights, (rows - 1, 1, 0, 1)).contiguous()
    slanted = roomy.as_strided((batch, heads, rows, pitch - 1), (roomy.stride(0), roomy.stride(1), pitch + 1, 1))
    return slanted.sum(-2)
