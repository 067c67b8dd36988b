"""PlacedLayer: a layer whose tokens stand somewhere in a picture."""

from __future__ import annotations

from torch import Tensor, nn

from saccade.matrix import Matrix
from saccade.nn import MultiHeadAttention
from saccade.nn.encoder_layer import ResidualLayer
from saccade.positions import Bias
from saccade.positions.token_positions import GivenPositions

__all__ = ["PlacedLayer"]


class PlacedLayer(ResidualLayer):
    """Tokens look at each other, at a context if there is a ``cross_attention``, then each is transformed by itself.

    Where a token stands is a vector, which is added to queries and keys in every layer anew, and never to values: what
    is gathered says what is there, not where.

    Args:
        attention: over the tokens themselves.
        feed_forward: a network that transforms each token by itself.
        cross_attention: over the context.
        norm_eps, norm_first, dropout_p: see `saccade.nn.EncoderLayer`.

    Reference: Carion et al. 2020, arXiv:2005.12872, section A.3.
    """

    attention: MultiHeadAttention
    cross_attention: MultiHeadAttention | None
    cross_attention_norm: nn.Module | None

    def __init__(
        self,
        attention: MultiHeadAttention,
        feed_forward: nn.Module,
        *,
        cross_attention: MultiHeadAttention | None = None,
        norm_eps: float = 1e-5,
        norm_first: bool = False,
        dropout_p: float = 0.0,
    ):
        attentions = {"attention": attention, "cross_attention": cross_attention}
        super().__init__(attentions, feed_forward, "layer", norm_eps, norm_first, dropout_p)

    def forward(
        self,
        x: Tensor,
        place: Tensor,
        context: Tensor | None = None,
        context_place: Tensor | None = None,
        *,
        context_mask: object = None,
        mask: object = None,
    ) -> Tensor:
        """Transform.

        Args:
            x: ``[batch, len, embed_dim]``.
            place: where its tokens stand, of the same shape, or one for the whole batch.
            context, context_place: what a cross-attention looks at, and where that stands.
            context_mask, mask: who may attend to what of the context, and of ``x``.

        Returns:
            ``[batch, len, embed_dim]``.
        """
        x = self._add(x, lambda x: self.attention(placed := x + place, placed, x, mask=mask), self.attention_norm)
        across, norm = self.cross_attention, self.cross_attention_norm
        if across is not None and norm is not None and context is not None and context_place is not None:
            placed = context + context_place
            x = self._add(x, lambda x: across(x + place, placed, context, mask=context_mask), norm)
        return self._add(x, self.feed_forward, self.feed_forward_norm)

    def matrix(
        self,
        x: Tensor,
        *,
        place: Tensor | None = None,
        mask: object = None,
        positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
    ) -> Matrix:
        """The self-attention matrix that `forward` multiplies by: ``[batch, num_heads, len, len]``, not built."""
        tokens = self.attention_norm(x) if self.norm_first else x
        tokens = tokens if place is None else tokens + place
        return self.attention.matrix(tokens, mask=mask, positions=positions, bias=bias)

    def cross_matrix(
        self, x: Tensor, place: Tensor, context: Tensor, context_place: Tensor, *, context_mask: object = None
    ) -> Matrix:
        """Who of x attends to what of the context in `forward`, ``[batch, num_heads, len, context_len]``, not built."""
        across, norm = self.cross_attention, self.cross_attention_norm
        assert across is not None and norm is not None  # noqa: PT018  SetDecoder asks its decoder's layers only
        x = self._add(x, lambda x: self.attention(placed := x + place, placed, x), self.attention_norm)
        tokens = norm(x) if self.norm_first else x
        return across.matrix(tokens + place, context + context_place, mask=context_mask)
