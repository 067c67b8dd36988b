"""StateSpace: a layer that mixes tokens by a state space, where self-attention would stand."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from saccade.arguments import flag, integer
from saccade.caches import LayerCache
from saccade.masks import Mask
from saccade.matrix import Matrix
from saccade.mechanisms import S4D
from saccade.nn.recurrent_layer import RecurrentLayer
from saccade.positions import Bias
from saccade.positions.tokens import GivenPositions

__all__ = ["StateSpace"]

_WHERE = "StateSpace"


class StateSpace(RecurrentLayer):
    r"""Each channel is filtered by a state space of its own, then channels are mixed: S4D's layer.

    .. math:: \mathrm{out} = W\, \mathrm{gelu}(A x) + b, \qquad A = \text{the S4D matrix of each channel}

    Stands where self-attention stands: in `EncoderLayer`, `DecoderLayer` and stacks, with packed and padded texts, and
    with a cache of constant size. A token sees what comes before it.

    Args:
        embed_dim: width, and number of channels.
        state_dim: numbers of each channel's state; see `saccade.mechanisms.S4D`.
        mask: joined with Causal and with the mask of each call by ``&``.
        projection_bias: whether the output projection has a bias.

    Raises:
        ValueError: sizes out of range, or inputs of another width.
        UnsupportedError: a mask that a state cannot have, or a bias.

    Cost: O(n log n) for each channel, and one projection.

    Example:
        >>> layer = StateSpace(16)
        >>> layer(torch.zeros(2, 5, 16)).shape, layer.matrix(torch.zeros(2, 5, 16)).shape
        (torch.Size([2, 5, 16]), (2, 16, 5, 5))

    Reference: Gu et al. 2022, arXiv:2206.11893, section 4.
    """

    mechanism: S4D

    def __init__(self, embed_dim: int, state_dim: int = 64, *, mask: Mask | None = None, projection_bias: bool = True):
        integer(_WHERE, "embed_dim", embed_dim)
        flag(_WHERE, "projection_bias", projection_bias)
        super().__init__(embed_dim, embed_dim, mask, S4D(embed_dim, state_dim))
        self.output_projection = nn.Linear(embed_dim, embed_dim, bias=projection_bias)
        self.reset_parameters()

    def forward(
        self,
        query: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Mix.

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
        channels = query.mT[..., None]
        if cache is None:
            mixed = self.mechanism(channels, channels, mask=joined, q_positions=own, kv_positions=own).matmul(channels)
        else:
            mixed = cache.attend(self.mechanism, channels, channels, channels, mask=joined, positions=own)
        return self.output_projection(F.gelu(mixed[..., 0].mT))

    def matrix(
        self,
        query: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
    ) -> Matrix:
        """The matrix of every channel, ``[batch, embed_dim, len, len]``, not built."""
        joined, own = self._facts(query, mask, positions, bias, None)
        channels = query.mT[..., None]  # as heads
        return self.mechanism(channels, channels, mask=joined, q_positions=own, kv_positions=own)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, mask={self.mask}"
