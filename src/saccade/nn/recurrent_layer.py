"""RecurrentLayer: the base of recurrent layers."""

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


class Read(NamedTuple):
    """The projections of a layer's tokens.

    Args:
        make: the mechanism, with the gates of these tokens.
        query, key, value: ``[batch, heads, len, width]``.
        gate: the output's gate, of the shape of the values, or None.
    """

    make: Callable[..., Matrix]
    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor | None = None


class RecurrentLayer(AttentionLayer):
    """The base of causal layers with a state.

    Args:
        embed_dim, num_heads, mechanism: as in `AttentionLayer`.
        mask: joined with Causal.
    """

    def __init__(self, embed_dim: int, num_heads: int, mask: Mask | None, mechanism: Mechanism):
        super().__init__(embed_dim, num_heads, mask, mechanism, 0.0)
        self.mask = Causal() if mask is None else mask if mask.is_causal else Causal() & mask

    @abstractmethod
    def _read(self, x: Tensor) -> Read:
        """Return the projections of tokens ``[batch, len, embed_dim]``."""

    @abstractmethod
    def _merged(self, out: Tensor, read: Read) -> Tensor:
        """Return ``[batch, len, embed_dim]`` from the output of the heads, ``[batch, heads, len, width]``."""

    def forward(
        self,
        query: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return the layer's output.

        Args:
            query: ``[batch, len, embed_dim]``; with a cache, the new tokens only.
            mask: the mask of this batch, such as packed documents or padding; joined with the layer's by ``&``.
            positions: positions of the tokens, in order; -1 marks padding. Only their order matters.
            bias: must be None: there are no scores.
            cache: the cache of earlier calls, from `new_cache`.

        Returns:
            ``[batch, len, embed_dim]``.
        """
        joined, positions = self._checked_options(query, mask, positions, bias, cache)
        read = self._read(query)
        make, heads, key, value, _ = read
        if cache is None:
            out = make(heads, key, mask=joined, q_positions=positions, kv_positions=positions).matmul(value)
        else:
            out = cache.attend(make, heads, key, value, mask=joined, positions=positions)
        return self._merged(out, read)

    def matrix(
        self,
        query: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
    ) -> Matrix:
        """Return the lazy matrix of every head, ``[batch, num_heads, len, len]``; arguments as in `forward`."""
        joined, positions = self._checked_options(query, mask, positions, bias, None)
        make, heads, key, _, _ = self._read(query)
        return make(heads, key, mask=joined, q_positions=positions, kv_positions=positions)

    def _checked_options(
        self, query: Tensor, mask: object, positions: GivenPositions, bias: object, cache: LayerCache | None
    ) -> tuple[Mask | None, Positions | None]:
        """Return the joined mask and the positions of a call, checked."""
        if bias is not None:
            raise unsupported("bias", ["there are no scores to which it could be added"])
        check_dense(query=query)
        if query.dim() != 3 or query.shape[2] != self.embed_dim:
            raise value_error("query", f"have shape [batch, len, {self.embed_dim}]", list(query.shape))
        batch, length, _ = query.shape
        cached = 0 if cache is None else cache.length
        joined = self._joined(mask, (batch, self.num_heads, length, cached + length))
        return joined, None if positions is None else Positions.of(positions, length=length, batch=batch)
