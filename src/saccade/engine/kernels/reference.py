"""The definition, dense: what every other kernel must equal."""

from __future__ import annotations

import math

from torch import Tensor

from saccade.engine import dropout
from saccade.engine.grouping import product
from saccade.engine.guard import bytes_of_look, is_clean, isolate
from saccade.engine.ingredients import ScoreMatrix
from saccade.engine.kernels.probe import Probe
from saccade.engine.memory import Cost, Held
from saccade.plan import Tile

__all__ = ["Reference"]


class Reference:
    """Softmax of the whole score matrix times the values, in plain torch operations.

    Cost: O(q_len * kv_len) memory per head. Runs everything, on any device, in any float type.
    """

    name = "reference"

    def reasons(self, scores: ScoreMatrix, dropout_p: float) -> tuple[str, ...]:
        """Nothing is beyond the definition."""
        del scores, dropout_p
        return ()

    def cost(self, scores: ScoreMatrix, value_dim: int, dropout_p: float) -> Cost:
        """All pairs, and the few tensors of them that are held at once."""
        batch, heads, q_len, kv_len = scores.shape
        whole, wide = scores.everything(), scores.compute_dtype.itemsize
        results = batch * heads * q_len * (value_dim * scores.dtype.itemsize + wide)

        def run(scores: ScoreMatrix, tile: Tile) -> tuple[Tensor, Tensor]:
            value = scores.key[..., : tile.width, :1]
            return _weighted(scores, tile, value, dropout_p, 0)

        held = Probe(scores, is_narrow=True).held("reference", whole, run)
        look = 0
        if not scores.plan.is_full:
            columns = batch * scores.key.shape[1] * kv_len
            look = bytes_of_look(columns * max(scores.key.shape[3], value_dim), scores.query.dtype)
        most = max(held.most + results, look)
        return Cost(1, self.pairs(scores), Held(most, results))

    def pairs(self, scores: ScoreMatrix) -> int:
        """All of them."""
        return math.prod(scores.shape)

    def run(
        self, scores: ScoreMatrix, value: Tensor, *, dropout_p: float = 0.0, seed: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output ``[batch, heads, q_len, value_dim]`` and lse ``[batch, heads, q_len]``."""
        if not is_clean(scores, scores.query, scores.key, value):
            isolated = isolate(scores, value)
            if isolated:
                return isolated.mark(*self._run(isolated.scores, isolated.value, dropout_p, seed))
        out, lse = self._run(scores, value, dropout_p, seed)
        spoilt = lse.detach().isnan()
        if out.requires_grad and not scores.plan.is_full and bool(spoilt.any()):
            isolated = isolate(scores, value, spoilt)
            assert isolated is not None  # there is a row to hide
            return isolated.mark(*self._run(isolated.scores, isolated.value, dropout_p, seed))
        return out, lse

    def _run(self, scores: ScoreMatrix, value: Tensor, dropout_p: float, seed: int | None) -> tuple[Tensor, Tensor]:
        return _weighted(scores, scores.everything(), value, dropout_p, seed)


def _weighted(
    scores: ScoreMatrix, tile: Tile, value: Tensor, dropout_p: float, seed: int | None
) -> tuple[Tensor, Tensor]:
    """The rows of a tile, and the values of its columns."""
    weights, lse = normalised(scores.tile(tile))
    if dropout_p > 0.0:
        b, h, (q, kv) = scores.batch_index(tile), scores.head_index(tile), scores.positions(tile)
        kept = dropout.keep(dropout.draw_seed() if seed is None else seed, b, h, q, kv, dropout_p)
        weights = weights * kept / (1.0 - dropout_p)
    out = product(weights, value.to(weights.dtype))
    # They are 0 already: what flows back to rows that see nothing, a NaN even, ends here.
    return out.masked_fill((lse == -math.inf)[..., None], 0.0).to(value.dtype), lse


def normalised(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over complete rows and its log-sum-exp; a row of nothing but -inf gives weights 0 and lse -inf."""
    if scores.shape[-1] == 0:
        return scores, scores.new_full(scores.shape[:-1], -math.inf)
    peak = scores.detach().amax(-1, keepdim=True)
    empty = peak == -math.inf
    # Where nothing is allowed, exp(0 - 0) stands in until the end, so that no NaN arises in the backward pass.
    shifted = (scores - peak.masked_fill(empty, 0.0)).masked_fill(empty, 0.0)
    exponentials = shifted.exp()
    total = exponentials.sum(-1, keepdim=True)
    weights = (exponentials / total).masked_fill(empty, 0.0)
    lse = (total.log() + peak.masked_fill(empty, 0.0)).masked_fill(empty, -math.inf)
    return weights, lse[..., 0]
