"""DecoderLayer: self-attention, optional cross-attention to an encoder's output, and a feed-forward network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from saccade.caches import Cache, CrossCache, LayerCache
from saccade.matrix import Matrix
from saccade.nn.attention import MultiHeadAttention
from saccade.nn.base_layer import AttentionLayer
from saccade.nn.encoder_layer import ResidualLayer
from saccade.nn.norms import Norm, make_norm
from saccade.nn.shared_keys import SharedKeys
from saccade.nn.shared_selection import SharedSelection
from saccade.positions import Bias
from saccade.positions.token_positions import GivenPositions
from saccade.support.errors import type_error, value_error
from saccade.support.validation import check_bool


class DecoderLayer(ResidualLayer):
    """A decoder layer: self-attention, cross-attention to a context, and a feed-forward network.

    Without ``cross_attention``, this is the layer of a language model. The layer does not mask later tokens itself:
    build the attention with ``mask=masks.Causal()`` or another causal mask, or pass a causal mask with each call.

    Args:
        attention: a `MultiHeadAttention`, `LatentAttention` or `DifferentialAttention` for self-attention.
        feed_forward: a `FeedForward`, or any module that maps ``[batch, len, embed_dim]`` to the same shape.
        cross_attention: a `MultiHeadAttention` that attends to the context; its ``context_dim`` may differ.
        norm, norm_eps, norm_first, dropout_p: see `EncoderLayer`.
        part_norm: whether each part's output is normalized before the residual addition: in addition to the norm before
            the part (Gemma 2 and 3) or, if ``norm_first`` is False, instead of the norm after the sum (OLMo 2).
        parallel: whether attention and feed-forward network read the same normalized input and are added together
            (GPT-J, Cohere), instead of one after the other. Requires ``norm_first`` and no ``cross_attention``.

    Attributes:
        attention_norm, cross_attention_norm, feed_forward_norm: the norms, which can be replaced by any module.
        attention_part_norm, feed_forward_part_norm: the norms after the parts, if there are also norms before them.

    Raises:
        TypeError: a part has the wrong type.
        ValueError: the parts have different widths, or the norm is unknown; in a call, there is a ``context`` without
            cross-attention, or cross-attention without a ``context``.

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
        part_norm: bool = False,
        parallel: bool = False,
        dropout_p: float = 0.0,
    ):
        attentions = {"attention": attention, "cross_attention": cross_attention}
        super().__init__(attentions, feed_forward, norm, norm_eps, norm_first, dropout_p)
        self.part_norm, self.parallel = check_bool("part_norm", part_norm), check_bool("parallel", parallel)
        for name, chosen in (("part_norm", part_norm), ("parallel", parallel)):
            if chosen and cross_attention is not None:
                raise value_error(name, "be False in a layer with cross_attention", True)
        if parallel and (part_norm or not norm_first):
            raise value_error("parallel", "be False unless norm_first is True and part_norm is False", True)
        norms_both_sides = part_norm and norm_first
        width = attention.embed_dim
        self.attention_part_norm = make_norm(norm, width, norm_eps) if norms_both_sides else None
        self.feed_forward_part_norm = make_norm(norm, width, norm_eps) if norms_both_sides else None
        if parallel:
            del self.feed_forward_norm
            self.feed_forward_norm = None  # type: ignore[assignment]

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: object = None,
        context_mask: object = None,
        positions: GivenPositions = None,
        context_positions: GivenPositions = None,
        rotary_positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
        cache: LayerCache | Cache | None = None,
        shared: SharedKeys | SharedSelection | None = None,
    ) -> Tensor:
        """Apply self-attention, cross-attention if the layer has it, and the feed-forward network.

        Args:
            x: ``[batch, len, embed_dim]``; with a cache, only the new tokens.
            context: the encoder's output, ``[batch, context_len, context_dim]``.
            mask: a mask for this batch, combined with the attention's own mask by ``&``.
            context_mask: which tokens of ``context`` each token of x may attend to. By default, positions in x start at
                0 or continue those in the cache.
            positions: positions of the tokens in x; see `MultiHeadAttention.forward`.
            context_positions: positions of the tokens in ``context``.
            rotary_positions: positions of the tokens in x for the rotation only; see `MultiHeadAttention.forward`.
            bias: added to the scores of the self-attention, as in `saccade.attention`; with a cache, it must be a
                function of positions.
            cache: the cache of earlier calls, from `new_cache`; new tokens are added to it. With cross-attention,
                ``context`` is projected in the first call and may be omitted in later calls.
            shared: passes keys and values, or selected keys, from one layer's self-attention to another's; see
                `SharedKeyAttention` and `LatentAttention`.

        Returns:
            ``[batch, len, embed_dim]``.
        """
        self_cache, cross_cache = self._caches(cache)
        context_cached = cross_cache is not None and cross_cache.is_filled
        cross, cross_norm = self.cross_attention, self.cross_attention_norm
        if (cross is None) != (context is None):
            self._check_context(context, context_cached)
        if self_cache is not None and positions is None and cross is not None:
            positions = self_cache.positions(x.shape[1])
        options: dict[str, Any] = {} if rotary_positions is None else {"rotary_positions": rotary_positions}
        if shared is not None:
            options["shared"] = shared
        parts = self._modules
        attention, attention_norm, feed_forward = parts["attention"], parts["attention_norm"], parts["feed_forward"]
        attend = partial(attention, mask=mask, positions=positions, bias=bias, cache=self_cache, **options)
        if self.parallel:
            tokens = attention_norm(x)
            return x + self._dropped(attend(tokens) + feed_forward(tokens))
        if self.part_norm:
            x = self._add_normed(x, attend, attention_norm, self.attention_part_norm)
            return self._add_normed(x, feed_forward, self.feed_forward_norm, self.feed_forward_part_norm)
        x = self._add(x, attend, attention_norm)
        if cross is not None and cross_norm is not None:
            attend_context = partial(
                cross,
                key=context,
                mask=context_mask,
                positions=_cross_positions(positions, x, context_mask),
                kv_positions=None if context_cached else context_positions,
                cache=cross_cache,
            )
            x = self._add(x, attend_context, cross_norm)
        return self._add(x, feed_forward, parts["feed_forward_norm"])

    def _add_normed(
        self, x: Tensor, part: Callable[[Tensor], Tensor], norm: nn.Module, part_norm: nn.Module | None
    ) -> Tensor:
        """Return ``x + dropout(norm(part(x)))``, or ``x + dropout(part_norm(part(norm(x))))`` with a ``part_norm``."""
        change = norm(part(x)) if part_norm is None else part_norm(part(norm(x)))
        return x + self._dropped(change)

    def cross_matrix(
        self,
        x: Tensor,
        context: Tensor,
        *,
        mask: object = None,
        context_mask: object = None,
        positions: GivenPositions = None,
        context_positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
    ) -> Matrix:
        """Return the lazy cross-attention matrix of `forward`: ``[batch, num_heads, len, context_len]``."""
        self._check_context(context, False)
        cross, cross_norm = self.cross_attention, self.cross_attention_norm
        assert cross is not None and cross_norm is not None  # noqa: PT018  checked above
        x = self._add(x, partial(self.attention, mask=mask, positions=positions, bias=bias), self.attention_norm)
        tokens = cross_norm(x) if self.norm_first else x
        positions = _cross_positions(positions, x, context_mask)
        return cross.matrix(tokens, context, mask=context_mask, positions=positions, kv_positions=context_positions)

    def new_cache(self, max_len: int | None = None) -> LayerCache | Cache:
        """Return an empty cache for this layer, including one for its cross-attention if there is one.

        Args:
            max_len: number of tokens to allocate memory for in advance; if None, the cache grows as needed.
        """
        cache = self.attention.new_cache(max_len)
        return cache if self.cross_attention is None else Cache([cache, CrossCache()])

    def _caches(self, cache: LayerCache | Cache | None) -> tuple[LayerCache | Cache | None, CrossCache | None]:
        """Return the layer's caches for self-attention and for cross-attention.

        Both are None if there is no cache, and the second is None if there is no cross-attention.
        """
        if cache is None:
            return None, None
        is_convolved = getattr(self._modules["attention"], "convolution", None) is not None
        self_cache_type = Cache if is_convolved else LayerCache
        if self.cross_attention is None and isinstance(cache, self_cache_type):
            return cache, None
        first, second = cache if isinstance(cache, Cache) and len(cache) == 2 else (None, None)
        if self.cross_attention is not None and isinstance(first, self_cache_type) and isinstance(second, CrossCache):
            return first, second
        kind = "the cache of a layer" if self.cross_attention is None else "a Cache([KVCache(), CrossCache()])"
        rule = f"be {kind}, or None"
        raise type_error("cache", rule, type(cache).__name__, hint="new_cache() of the layer makes one")

    def _check_context(self, context: Tensor | None, context_cached: bool) -> None:
        """Raise an error if a layer without cross-attention gets a context, or one with cross-attention gets none."""
        if self.cross_attention is None and context is not None:
            hint = "DecoderLayer(..., cross_attention=MultiHeadAttention(...)) makes a layer with cross-attention"
            rule = "be None in a layer without cross_attention"
            raise value_error("context", rule, type(context).__name__, hint=hint)
        if self.cross_attention is not None and context is None and not context_cached:
            hint = "with a cache it may be omitted from the second call on"
            rule = "be given to a layer with cross_attention"
            raise value_error("context", rule, None, hint=hint)


def _cross_positions(positions: GivenPositions, x: Tensor, context_mask: object) -> GivenPositions:
    """Return the positions of cross-attention queries in their own sequence, regardless of the context's length.

    A tensor mask needs no positions, because its rows are the queries.
    """
    if positions is not None or isinstance(context_mask, Tensor):
        return positions
    return range(x.shape[1])
