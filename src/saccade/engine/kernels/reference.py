"""The definition, dense: what every other kernel must equal."""

from __future__ import annotations

import math

from torch import Tensor

from saccade.engine import dropout
from saccade.engine.dropout import Dropped
from saccade.engine.inputs import Ingredients
from saccade.engine.kernels.kernel import Kernel
from saccade.engine.kernels.memory_probe import Probe
from saccade.engine.memory_accounting import Cost, Held
from saccade.engine.tiles.grouped_heads import product
from saccade.engine.tiles.tile_scores import index_of, normalised, positions, scores_of
from saccade.plan import Tile

__all__ = ["Reference", "weighted"]


class Reference(Kernel):
    """Softmax of the whole score matrix times the values, in plain torch operations.

    Cost: O(q_len * kv_len) memory per head. Runs everything, on any device, in any float type.
    """

    name = "reference"

    def cost(self, given: Ingredients, value_dim: int, dropout_p: float) -> Cost:
        """All pairs, and the few tensors of them that are held at once."""
        batch, heads, q_len, _ = given.shape
        results = batch * heads * q_len * (value_dim * given.dtype.itemsize + given.compute_dtype.itemsize)
        dropped = Dropped(dropout_p, 0) if dropout_p else None

        def run(given: Ingredients, tile: Tile) -> tuple[Tensor, Tensor]:
            return weighted(given, tile, scores_of(given, tile), given.key[..., : tile.width, :1], dropped)

        held = Probe(given, is_narrow=True).held("reference", given.everything, run)
        return Cost(1, self.pairs(given), Held(held.most + results, results))

    def pairs(self, given: Ingredients) -> int:
        """All of them."""
        return math.prod(given.shape)

    def forward(self, given: Ingredients, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor]:
        """Output and lse."""
        return weighted(given, given.everything, scores_of(given, given.everything), value, dropped)


def weighted(
    given: Ingredients, tile: Tile, scores: Tensor, value: Tensor, dropped: Dropped | None
) -> tuple[Tensor, Tensor]:
    """Return output and lse of the complete rows of a tile, from its scores and the values of its columns."""
    weights, lse = normalised(scores)
    if dropped is not None:
        b, h, _ = index_of(given, tile)
        weights = (
            weights
            * dropout.keep(dropped.seed, dropped.items(b), h, *positions(given, tile), dropped.p)
            / (1.0 - dropped.p)
        )
    out = product(weights, value.to(weights.dtype))
    # They are 0 already: what flows back to rows that see nothing, a NaN even, ends here.
    return out.masked_fill((lse == -math.inf)[..., None], 0.0).to(value.dtype), lse
