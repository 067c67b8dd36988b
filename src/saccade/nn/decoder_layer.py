"""DecoderLayer: self-attention, cross-attention to an encoder's output (if there is one), a feed-forward network."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from saccade.caches import Cache, CrossCache, LayerCache
from saccade.matrix import Matrix
from saccade.nn.attention import MultiHeadAttention
from saccade.nn.base_layer import AttentionLayer
from saccade.nn.encoder_layer import ResidualLayer
from saccade.nn.norms import Norm
from saccade.positions import Bias
from saccade.positions.token_positions import GivenPositions
from saccade.support.errors import type_error, value_error

__all__ = ["DecoderLayer"]


class DecoderLayer(ResidualLayer):
    """Tokens look at those before them, then at an encoder's output, then each is transformed by itself.

    Without ``cross_attention`` this is the layer of a language model. It is the attention's mask that hides later
    tokens: give it ``mask=masks.Causal()`` or any other causal mask, or pass one with each call.

    Args:
        attention: a `MultiHeadAttention`, `LatentAttention` or `DifferentialAttention`, over the tokens themselves.
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

    cross_attention: MultiHeadAttention | None
    cross_attention_norm: nn.Module | None

    def __init__(
        self,
        attention: AttentionLayer,
        feed_forward: nn.Module,
        *,
        cross_attention: MultiHeadAttention | None = None,
        norm: Norm = "layer",
        norm_eps: float = 1e-5,
        norm_first: bool = True,
        dropout_p: float = 0.0,
    ):
        attentions = {"attention": attention, "cross_attention": cross_attention}
        super().__init__(attentions, feed_forward, norm, norm_eps, norm_first, dropout_p)

    def forward(
        self,
        x: Tensor,
        encoded: Tensor | None = None,
        *,
        mask: object = None,
        encoded_mask: object = None,
        positions: GivenPositions = None,
        encoded_positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
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
            bias: added to the scores of x among itself, as in `saccade.attention`; a rule on positions with a cache.
            cache: what the layer remembers of earlier calls, as `new_cache` makes it; the new tokens are added. With
                cross-attention, ``encoded`` is projected in the first call and may be left out from then on.

        Returns:
            ``[batch, len, embed_dim]``.
        """
        own, across = self._caches(cache)
        is_known = across is not None and across.is_filled
        cross, cross_norm = self.cross_attention, self.cross_attention_norm
        if (cross is None) != (encoded is None):
            self._check_encoded(encoded, is_known)
        if own is not None and positions is None and cross is not None:
            positions = own.positions(x.shape[1])
        attend = partial(self.attention, mask=mask, positions=positions, bias=bias, cache=own)
        x = self._add(x, attend, self.attention_norm)
        if cross is not None and cross_norm is not None:
            look_across = partial(
                cross,
                key=encoded,
                mask=encoded_mask,
                positions=_in_own_text(positions, x, encoded_mask),
                kv_positions=None if is_known else encoded_positions,
                cache=across,
            )
            x = self._add(x, look_across, cross_norm)
        return self._add(x, self.feed_forward, self.feed_forward_norm)

    def cross_matrix(
        self,
        x: Tensor,
        encoded: Tensor,
        *,
        mask: object = None,
        encoded_mask: object = None,
        positions: GivenPositions = None,
        encoded_positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
    ) -> Matrix:
        """Who of x attends to what of ``encoded`` in `forward`: ``[batch, num_heads, len, encoded_len]``, not built."""
        self._check_encoded(encoded, False)
        cross, cross_norm = self.cross_attention, self.cross_attention_norm
        assert cross is not None and cross_norm is not None  # noqa: PT018  checked in the line before
        x = self._add(x, partial(self.attention, mask=mask, positions=positions, bias=bias), self.attention_norm)
        tokens = cross_norm(x) if self.norm_first else x
        own = _in_own_text(positions, x, encoded_mask)
        return cross.matrix(tokens, encoded, mask=encoded_mask, positions=own, kv_positions=encoded_positions)

    def new_cache(self, max_len: int | None = None) -> LayerCache | Cache:
        """An empty cache for this layer: one for its attention, and one for its cross-attention if it has one.

        Args:
            max_len: room for so many tokens, taken at once; None to grow.
        """
        own = self.attention.new_cache(max_len)
        return own if self.cross_attention is None else Cache([own, CrossCache()])

    def _caches(self, cache: LayerCache | Cache | None) -> tuple[LayerCache | None, CrossCache | None]:
        """The cache of the attention, and that of the cross-attention."""
        if cache is None:
            return None, None
        if self.cross_attention is None and isinstance(cache, LayerCache):
            return cache, None
        own, across = cache if isinstance(cache, Cache) and len(cache) == 2 else (None, None)
        if self.cross_attention is not None and isinstance(own, LayerCache) and isinstance(across, CrossCache):
            return own, across
        wanted = "the cache of a layer" if self.cross_attention is None else "a Cache([KVCache(), CrossCache()])"
        rule = f"be {wanted}, or None"
        raise type_error("cache", rule, type(cache).__name__, hint="new_cache() of the layer makes one")

    def _check_encoded(self, encoded: Tensor | None, is_known: bool) -> None:
        """Refuse an ``encoded`` that nothing looks at, and none where it is needed."""
        if self.cross_attention is None and encoded is not None:
            hint = "DecoderLayer(..., cross_attention=MultiHeadAttention(...)) makes a layer that looks across"
            rule = "be None in a layer without cross_attention"
            raise value_error("encoded", rule, type(encoded).__name__, hint=hint)
        if self.cross_attention is not None and encoded is None and not is_known:
            hint = "with a cache it may be left out from the second call on"
            rule = "be given to a layer with cross_attention"
            raise value_error("encoded", rule, None, hint=hint)


def _in_own_text(positions: GivenPositions, x: Tensor, encoded_mask: object) -> GivenPositions:
    """Where tokens stand when they look across: where they stand in their own text, whatever the other's length.

    A mask that is a tensor goes by rows, not by positions.
    """
    if positions is not None or isinstance(encoded_mask, Tensor):
        return positions
    return range(x.shape[1])
