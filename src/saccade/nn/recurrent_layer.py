"""RecurrentLayer: what layers that read a state have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from saccade.caches import LayerCache
from saccade.engine.nested import check_dense
from saccade.masks import Causal, Mask
from saccade.matrix import Matrix
from saccade.mechanisms import Mechanism
from saccade.nn.base_layer import AttentionLayer
from saccade.positions import Bias
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.errors import unsupported, value_error

__all__ = ["Read", "RecurrentLayer"]


class Read(NamedTuple):
    """What a layer makes of its tokens.

    Args:
        make: the mechanism, with the gates of these tokens.
        query, key, value: ``[batch, heads, len, width]``.
        gate: of the output, like the values; None for none.
    """

    make: Callable[..., Matrix]
    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor | None = None


class RecurrentLayer(AttentionLayer):
    """A layer whose tokens see what comes before them, in the order in which it was written.

    Args:
        embed_dim, num_heads, mechanism: as in `AttentionLayer`.
        mask: joined with Causal.
    """

    def __init__(self, embed_dim: int, num_heads: int, mask: Mask | None, mechanism: Mechanism):
        super().__init__(embed_dim, num_heads, mask, mechanism, 0.0)
        self.mask = Causal() if mask is None else mask if mask.is_causal else Causal() & mask

    @abstractmethod
    def _read(self, x: Tensor) -> Read:
        """What tokens ``[batch, len, embed_dim]`` read, write, and are told apart by."""

    @abstractmethod
    def _merged(self, out: Tensor, read: Read) -> Tensor:
        """``[batch, len, embed_dim]`` of what heads have read, ``[batch, heads, len, width]``."""

    def forward(
        self,
        query: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Write, and read.

        Args:
            query: ``[batch, len, embed_dim]``; with a cache, the new tokens only.
            mask: the facts of this batch: packed texts, padding; joined with the layer's by ``&``.
            positions: where the tokens stand, in order; -1 for no token. Only their order counts.
            bias: None; there are no scores to which one could be added.
            cache: what the layer remembers of earlier calls, as `new_cache` makes it.

        Returns:
            ``[batch, len, embed_dim]``.
        """
        joined, own = self._facts(query, mask, positions, bias, cache)
        read = self._read(query)
        make, heads, key, value, _ = read
        if cache is None:
            out = make(heads, key, mask=joined, q_positions=own, kv_positions=own).matmul(value)
        else:
            out = cache.attend(make, heads, key, value, mask=joined, positions=own)
        return self._merged(out, read)

    def matrix(
        self,
        query: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
    ) -> Matrix:
        """The matrix of every head, ``[batch, num_heads, len, len]``, not built; arguments as in `forward`."""
        joined, own = self._facts(query, mask, positions, bias, None)
        make, heads, key, _, _ = self._read(query)
        return make(heads, key, mask=joined, q_positions=own, kv_positions=own)

    def _facts(
        self, query: Tensor, mask: object, positions: GivenPositions, bias: object, cache: LayerCache | None
    ) -> tuple[Mask | None, Positions | None]:
        """The mask and the positions of a call, checked."""
        if bias is not None:
            raise unsupported("bias", ["there are no scores to which it could be added"])
        check_dense(query=query)
        if query.dim() != 3 or query.shape[2] != self.embed_dim:
            raise value_error("query", f"have shape [batch, len, {self.embed_dim}]", list(query.shape))
        batch, length, _ = query.shape
        held = 0 if cache is None else cache.length
        joined = self._joined(mask, (batch, self.num_heads, length, held + length))
        return joined, None if positions is None else Positions.of(positions, length=length, batch=batch)
