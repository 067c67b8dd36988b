"""DecoderLayer: self-attention, cross-attention where there is something to look across to, a feed-forward network."""

from __future__ import annotations

from torch import Tensor, nn

from saccade.caches import Cache, CrossCache, LayerCache
from saccade.engine.at_positions import Positions
from saccade.errors import type_error, value_error
from saccade.matrix import Matrix
from saccade.nn.attention import MultiHeadAttention
from saccade.nn.norms import Norm, make_norm
from saccade.nn.residual import add_sublayer, check_parts

__all__ = ["DecoderLayer"]


class DecoderLayer(nn.Module):
    """Tokens look at those before them, then at what an encoder made of its own, then each is transformed by itself.

    Without ``cross_attention`` this is the layer of a language model. That tokens do not see what comes later is the
    business of the attention's mask: give it ``mask=masks.Causal()`` or any other causal mask, or pass one with each
    call.

    Args:
        attention: a `MultiHeadAttention`, over the tokens themselves.
        feed_forward: a `FeedForward`, or any module from ``[batch, len, embed_dim]`` to the same.
        cross_attention: a `MultiHeadAttention` over the encoder's output; its ``context_dim`` may differ.
        norm, norm_eps, norm_first, dropout_p: see `EncoderLayer`.

    Attributes:
        attention_norm, cross_attention_norm, feed_forward_norm: the norms; any module may be put in their place.

    Raises:
        TypeError: a part of the wrong kind.
        ValueError: parts of different widths, an unknown norm; on use, ``encoded`` where there is no cross-attention,
            or none where there is.

    Example:
        >>> import torch
        >>> from saccade.masks import Causal
        >>> from saccade.nn import FeedForward
        >>> attention, cross = MultiHeadAttention(16, 4, mask=Causal()), MultiHeadAttention(16, 4, context_dim=8)
        >>> layer = DecoderLayer(attention, FeedForward(16, 64), cross_attention=cross)
        >>> layer(torch.zeros(2, 5, 16), torch.zeros(2, 7, 8)).shape
        torch.Size([2, 5, 16])

    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.1.
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        feed_forward: nn.Module,
        *,
        cross_attention: MultiHeadAttention | None = None,
        norm: Norm = "layer",
        norm_eps: float = 1e-5,
        norm_first: bool = True,
        dropout_p: float = 0.0,
    ):
        super().__init__()
        attentions = {"attention": attention, "cross_attention": cross_attention}
        check_parts("DecoderLayer", attentions, feed_forward, dropout_p, norm_first)
        self.norm_first = norm_first
        self.attention, self.cross_attention, self.feed_forward = attention, cross_attention, feed_forward

        def new_norm() -> nn.Module:
            return make_norm(norm, attention.embed_dim, norm_eps, "DecoderLayer")

        self.attention_norm, self.feed_forward_norm = new_norm(), new_norm()
        self.cross_attention_norm = None if cross_attention is None else new_norm()
        self.dropout = nn.Dropout(dropout_p)

    def forward(
        self,
        x: Tensor,
        encoded: Tensor | None = None,
        *,
        mask: object = None,
        encoded_mask: object = None,
        positions: Positions = None,
        encoded_positions: Positions = None,
        cache: LayerCache | Cache | None = None,
    ) -> Tensor:
        """Transform.

        Args:
            x: ``[batch, len, embed_dim]``; with a cache, the new tokens only.
            encoded: what the encoder made, ``[batch, encoded_len, context_dim]``.
            mask: the facts of this batch; joined with the attention's own mask by ``&``.
            encoded_mask: who of x may attend to what of ``encoded``; x counts from 0, or from where the cache is.
            positions: where the tokens of x stand; see `MultiHeadAttention.forward`.
            encoded_positions: where those of ``encoded`` stand.
            cache: what the layer remembers of earlier calls, as `new_cache` makes it; the new tokens are added. With
                cross-attention, ``encoded`` is projected in the first call and may be left out from then on.

        Returns:
            ``[batch, len, embed_dim]``.
        """
        own, across = self._caches(cache)
        self._check_encoded(encoded, across)
        if own is not None and positions is None and self.cross_attention is not None:
            positions = own.positions(x.shape[1])

        def attend(tokens: Tensor) -> Tensor:
            return self.attention(tokens, mask=mask, positions=positions, cache=own)

        x = add_sublayer(x, attend, self.attention_norm, self.dropout, self.norm_first)
        cross, cross_norm = self.cross_attention, self.cross_attention_norm
        if cross is not None and cross_norm is not None:

            def look_across(tokens: Tensor) -> Tensor:
                is_known = across is not None and across.is_filled
                return cross(
                    tokens,
                    encoded,
                    mask=encoded_mask,
                    positions=_in_own_text(positions, x, encoded_mask),
                    kv_positions=None if is_known else encoded_positions,
                    cache=across,
                )

            x = add_sublayer(x, look_across, cross_norm, self.dropout, self.norm_first)
        return add_sublayer(x, self.feed_forward, self.feed_forward_norm, self.dropout, self.norm_first)

    def matrix(self, x: Tensor, *, mask: object = None, positions: Positions = None) -> Matrix:
        """Who of x attends to whom of x in `forward`: ``[batch, num_heads, len, len]``, not built."""
        tokens = self.attention_norm(x) if self.norm_first else x
        return self.attention.matrix(tokens, mask=mask, positions=positions)

    def cross_matrix(
        self,
        x: Tensor,
        encoded: Tensor,
        *,
        mask: object = None,
        encoded_mask: object = None,
        positions: Positions = None,
        encoded_positions: Positions = None,
    ) -> Matrix:
        """Who of x attends to what of ``encoded`` in `forward`: ``[batch, num_heads, len, encoded_len]``, not built."""
        self._check_encoded(encoded, None)
        assert self.cross_attention is not None and self.cross_attention_norm is not None  # noqa: PT018  checked in the line before
        x = add_sublayer(
            x,
            lambda tokens: self.attention(tokens, mask=mask, positions=positions),
            self.attention_norm,
            self.dropout,
            self.norm_first,
        )
        tokens = self.cross_attention_norm(x) if self.norm_first else x
        own = _in_own_text(positions, x, encoded_mask)
        return self.cross_attention.matrix(
            tokens, encoded, mask=encoded_mask, positions=own, kv_positions=encoded_positions
        )

    def new_cache(self, max_len: int | None = None) -> LayerCache | Cache:
        """An empty cache for this layer: that of its attention, and beside it one for what it looks across to.

        Args:
            max_len: room for so many tokens, taken at once; None to grow.
        """
        own = self.attention.mechanism.new_cache(max_len)
        return own if self.cross_attention is None else Cache([own, CrossCache()])

    def extra_repr(self) -> str:
        return f"norm_first={self.norm_first}"

    def _caches(self, cache: LayerCache | Cache | None) -> tuple[LayerCache | None, CrossCache | None]:
        """That of the attention, and that of the cross-attention."""
        if cache is None:
            return None, None
        if self.cross_attention is None and isinstance(cache, LayerCache):
            return cache, None
        pair = tuple(cache) if isinstance(cache, Cache) and self.cross_attention is not None else ()
        if len(pair) == 2 and isinstance(pair[0], LayerCache) and isinstance(pair[1], CrossCache):
            return pair[0], pair[1]
        wanted = "the cache of a layer" if self.cross_attention is None else "a Cache([KVCache(), CrossCache()])"
        rule = f"be {wanted}, or None"
        raise type_error("DecoderLayer", "cache", rule, type(cache).__name__, hint="new_cache() of the layer makes one")

    def _check_encoded(self, encoded: Tensor | None, across: CrossCache | None) -> None:
        if self.cross_attention is None and encoded is not None:
            hint = "DecoderLayer(..., cross_attention=MultiHeadAttention(...)) makes a layer that looks across"
            rule = "be None in a layer without cross_attention"
            raise value_error("DecoderLayer", "encoded", rule, type(encoded).__name__, hint=hint)
        is_known = across is not None and across.is_filled
        if self.cross_attention is not None and encoded is None and not is_known:
            hint = "with a cache it may be left out from the second call on"
            rule = "be given to a layer with cross_attention"
            raise value_error("DecoderLayer", "encoded", rule, None, hint=hint)


def _in_own_text(positions: Positions, x: Tensor, encoded_mask: object) -> Positions:
    """Where tokens stand when they look across: where they do in their own text, whatever the other's length.

    A tensor says itself which rows it means.
    """
    if positions is not None or isinstance(encoded_mask, Tensor):
        return positions
    return range(x.shape[1])
