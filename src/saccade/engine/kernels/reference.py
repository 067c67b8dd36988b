"""Reference: a kernel that computes the definition of attention with dense weights. All kernels must agree with it."""

from __future__ import annotations

import math

from torch import Tensor

from saccade.engine import dropout
from saccade.engine.dropout import Dropped
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Kernel
from saccade.engine.memory_accounting import Cost, MemoryUse, Probe
from saccade.engine.tiles.grouped_heads import product
from saccade.engine.tiles.tile_scores import index_of, normalised, positions, scores_of
from saccade.plan import Tile


class Reference(Kernel):
    """The reference kernel: softmax of the full score matrix times the values, in plain torch operations.

    Cost: O(q_len * kv_len) memory per head. It supports all inputs, on any device, in any float dtype.
    """

    name = "reference"

    def cost(self, inputs: AttentionInputs, value_dim: int, dropout_p: float) -> Cost:
        """Return the cost of dense attention, with all pairs and the peak memory of the dense tensors, in bytes."""
        batch, heads, q_len, _ = inputs.shape
        results = batch * heads * q_len * (value_dim * inputs.dtype.itemsize + inputs.compute_dtype.itemsize)
        dropped = Dropped(dropout_p, 0) if dropout_p else None

        def run(inputs: AttentionInputs, tile: Tile) -> tuple[Tensor, Tensor]:
            return weighted(inputs, tile, scores_of(inputs, tile), inputs.key[..., : tile.width, :1], dropped)

        held = Probe(inputs, is_narrow=True).held("reference", inputs.everything, run)
        return Cost(1, self.pairs(inputs), MemoryUse(held.most + results, results))

    def pairs(self, inputs: AttentionInputs) -> int:
        """Return the number of all query-key pairs, because dense attention computes every score."""
        return math.prod(inputs.shape)

    def forward(self, inputs: AttentionInputs, value: Tensor, dropped: Dropped | None) -> tuple[Tensor, Tensor]:
        """Compute the output and the lse of dense attention."""
        return weighted(inputs, inputs.everything, scores_of(inputs, inputs.everything), value, dropped)


def weighted(
    inputs: AttentionInputs, tile: Tile, scores: Tensor, value: Tensor, dropped: Dropped | None
) -> tuple[Tensor, Tensor]:
    """Compute the output and the lse of a tile of complete rows from its scores and values."""
    weights, lse = normalised(scores)
    if dropped is not None:
        b, h, _ = index_of(inputs, tile)
        weights = (
            weights
            * dropout.keep(dropped.seed, dropped.items(b), h, *positions(inputs, tile), dropped.p)
            / (1.0 - dropped.p)
        )
    out = product(weights, value.to(weights.dtype))
    # Empty rows are 0 already; masking them again stops gradients (even NaN) from flowing into them.
    return out.masked_fill((lse == -math.inf)[..., None], 0.0).to(value.dtype), lse
