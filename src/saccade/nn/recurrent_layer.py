"""RecurrentLayer: what layers that read a state have in common."""

from __future__ import annotations

from torch import Tensor

from saccade.caches import LayerCache
from saccade.errors import unsupported, value_error
from saccade.masks import Causal, Mask
from saccade.mechanisms import Mechanism
from saccade.nn.attention_layer import AttentionLayer
from saccade.positions.tokens import GivenPositions, Positions

__all__ = ["RecurrentLayer"]


class RecurrentLayer(AttentionLayer):
    """A layer whose tokens see what comes before them, in the order in which it was written.

    Args:
        embed_dim, num_heads, mechanism: as in `AttentionLayer`.
        mask: joined with Causal.
    """

    def __init__(self, embed_dim: int, num_heads: int, mask: Mask | None, mechanism: Mechanism):
        super().__init__(embed_dim, num_heads, mask, mechanism, 0.0)
        self.mask = Causal() if mask is None else mask if mask.is_causal else Causal() & mask

    def _facts(
        self, query: Tensor, mask: object, positions: GivenPositions, bias: object, cache: LayerCache | None
    ) -> tuple[Mask | None, Positions | None]:
        """The mask and the positions of a call, checked."""
        where = type(self).__name__
        if bias is not None:
            raise unsupported(where, "bias", ["there are no scores to which it could be added"])
        if query.dim() != 3 or query.shape[2] != self.embed_dim:
            raise value_error(where, "query", f"have shape [batch, len, {self.embed_dim}]", list(query.shape))
        batch, length, _ = query.shape
        held = 0 if cache is None else cache.length
        joined = self._joined(mask, (batch, self.num_heads, length, held + length))
        return joined, None if positions is None else Positions.of(positions, where, length=length, batch=batch)
