"""SharedKeyAttention, which reads an earlier layer's keys and values, and MixedValues, which mixes in values."""

from __future__ import annotations

from types import NoneType

import torch
from torch import Tensor, nn

from saccade.caches import KVCache, LayerCache
from saccade.masks import Mask
from saccade.matrix import Matrix
from saccade.mechanisms import Mechanism
from saccade.nn import attention_checks as checks
from saccade.nn.attention_heads import Heads, rotation_positions, with_temperature
from saccade.nn.base_layer import AttentionLayer
from saccade.nn.projections import weight_of
from saccade.nn.qk_norm import QKNorm, norm_and_rotate
from saccade.positions import Bias, QueryTemperature, Rotary
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.errors import unsupported, value_error
from saccade.support.validation import check_bool, check_int, check_type

KEY_PARTS = ("key_projection", "value_projection", "key_norm")
"""The parts of a `MultiHeadAttention` that a `SharedKeyAttention` does not have."""


class SharedKeys:
    """The keys and values that a layer computes in one call, for later layers that read them."""

    def __init__(self) -> None:
        self._stored: tuple[Tensor, Tensor] | None = None
        self._has_graph = False

    def exchange(self, key: Tensor, value: Tensor) -> Tensor:
        """Store the keys and values of the layer's call, ``[batch, kv_heads, len, width]``.

        Returns:
            The values that the layer uses: ``value``, unchanged.
        """
        self._stored, self._has_graph = (key, value), torch.is_grad_enabled()
        return value

    def read(self) -> tuple[Tensor, Tensor]:
        """Return the stored keys and values.

        Raises:
            ValueError: the layer that computes them has not run.
            UnsupportedError: gradients would be lost, because that layer ran without an autograd graph.
        """
        if self._stored is None:
            rule, hint = "contain the keys and values of an earlier layer", "a DecoderStack passes them on"
            raise value_error("shared", rule, "none", hint=hint)
        if torch.is_grad_enabled() and not self._has_graph:
            reason = "the layer that computed the keys and values ran without gradients, so theirs would be lost"
            raise unsupported("shared", [reason], hint="torch.utils.checkpoint with use_reentrant=False supports it")
        return self._stored


class MixedValues(SharedKeys):
    """The mixing of the first layer's values into those of a later layer (value residual).

    Args:
        first: the keys and values of the first layer.
        weights: the weights of the first layer's values and of the later layer's own, ``[2]``.
    """

    def __init__(self, first: SharedKeys, weights: Tensor):
        super().__init__()
        self._first, self._weights = first, weights

    def exchange(self, key: Tensor, value: Tensor) -> Tensor:
        """Return the layer's values, mixed with those of the first layer."""
        return self._weights[0] * self._first.read()[1] + self._weights[1] * value


class SharedKeyAttention(AttentionLayer):
    r"""Self-attention that reuses the keys and values of an earlier layer of the same stack.

    .. math:: \mathrm{out} = \mathrm{Concat}(A_1 V'_1, \dots, A_h V'_h)\, W_O, \qquad
              A_i = \mathrm{mechanism}(Q W_i^Q, K'_i)

    where K' and V' are the keys and values of layer ``source``, after its norms and rotation. The layer has no cache of
    its own: it reads the source's cache, so the keys and values are stored once. Only a `saccade.nn.DecoderStack` can
    call the layer, because the stack passes on the keys and values.

    Args:
        embed_dim: width of the tokens.
        num_heads: number of query heads.
        source: index of the earlier layer in the stack, from 0; its attention is a `MultiHeadAttention`. The keys of a
            `ForgettingAttention` contain gates, so ``mechanism`` must then be a `saccade.mechanisms.Forgetting`.
        num_kv_heads: number of key and value heads of the source; ``num_heads`` if None.
        head_dim, mask, mechanism, rotary, temperature, dropout_p, projection_bias: see `MultiHeadAttention`. The mask
            may differ from that of the source.
        qk_norm: the norm of queries, or None; see `MultiHeadAttention`.

    Raises:
        ValueError: sizes that do not divide evenly, or inputs of the wrong width.
        UnsupportedError: in a call, a cache other than a `saccade.caches.KVCache`.

    Cost: two projections, plus the mechanism; no memory in the cache.

    Example:
        >>> from saccade.masks import Causal
        >>> from saccade.nn import DecoderLayer, DecoderStack, FeedForward, MultiHeadAttention
        >>> first = DecoderLayer(MultiHeadAttention(16, 4, mask=Causal()), FeedForward(16, 32))
        >>> second = DecoderLayer(SharedKeyAttention(16, 4, 0, mask=Causal()), FeedForward(16, 32))
        >>> stack = DecoderStack([first, second])
        >>> stack(torch.zeros(1, 5, 16)).shape, len(stack.new_cache())
        (torch.Size([1, 5, 16]), 1)

    Reference: Brandon et al. 2024, arXiv:2405.12981; Gemma 3n shares keys and values in its last layers.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        source: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        mask: Mask | None = None,
        mechanism: Mechanism | None = None,
        rotary: Rotary | None = None,
        qk_norm: QKNorm | None = None,
        temperature: QueryTemperature | None = None,
        dropout_p: float = 0.0,
        projection_bias: bool = True,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        width = checks.check_sizes(embed_dim, num_heads, num_kv_heads, embed_dim, head_dim, dropout_p)
        super().__init__(embed_dim, num_heads, mask, mechanism, dropout_p)
        self.source: int | None = check_int("source", source, 0)
        self.num_kv_heads, self.head_dim = num_kv_heads, width
        checks.check_rotary(rotary, width)
        self.rotary: nn.Module | None = rotary
        self.qk_norm = check_type("qk_norm", qk_norm, (QKNorm, NoneType), "be a saccade.nn.QKNorm or None")
        kinds, rule = (QueryTemperature, NoneType), "be a saccade QueryTemperature or None"
        self.temperature = check_type("temperature", temperature, kinds, rule)
        self.query_norm = None if qk_norm is None else qk_norm.make(num_heads, width)
        has_bias = check_bool("projection_bias", projection_bias)
        self.query_projection = nn.Linear(embed_dim, num_heads * width, bias=has_bias)
        self.output_projection = nn.Linear(num_heads * width, embed_dim, bias=has_bias)
        self.reset_parameters()

    def forward(
        self,
        query: Tensor,
        *,
        shared: SharedKeys | None = None,
        mask: object = None,
        positions: GivenPositions = None,
        rotary_positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attend to the keys and values of the source layer.

        Args:
            query: the tokens, ``[batch, len, embed_dim]``; with a cache, only the new tokens.
            shared: the keys and values that the source layer has computed in this call.
            mask, positions, rotary_positions, bias: see `MultiHeadAttention.forward`.
            cache: the cache of the source, to which the source has already added the new tokens.

        Returns:
            ``[batch, len, embed_dim]``.
        """
        heads = self._heads(query, shared, mask, positions, rotary_positions, cache)
        dropout_p = self.dropout_p if self.training else 0.0
        if bias is not None and cache is not None:
            bias = checks.checked_bias(bias)
        out = self._matrix(heads, bias).matmul(heads.value, dropout_p=dropout_p)
        return self.output_projection(out.transpose(1, 2).flatten(2))

    def matrix(
        self,
        query: Tensor,
        *,
        shared: SharedKeys | None = None,
        mask: object = None,
        positions: GivenPositions = None,
        rotary_positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
    ) -> Matrix:
        """Return the lazy matrix of attention to the source's keys, ``[batch, num_heads, len, len]``; see `forward`."""
        return self._matrix(self._heads(query, shared, mask, positions, rotary_positions, None), bias)

    def new_cache(self, max_len: int | None = None) -> LayerCache:
        """Raise an error, because the source's cache stores the keys and values.

        Raises:
            UnsupportedError: always.
        """
        reason = f"it reads the cache of layer {self.source}"
        raise unsupported("new_cache", [reason], hint="new_cache() of the stack makes the caches of all layers")

    def extra_repr(self) -> str:
        sizes = f"{self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        return f"{sizes}, source={self.source}, mask={self.mask}, dropout_p={self.dropout_p}"

    def _matrix(self, heads: Heads, bias: Tensor | Bias | None) -> Matrix:
        mechanism = self.mechanism if bias is None else self.mechanism.with_bias(bias)
        return mechanism(
            heads.query, heads.key, mask=heads.mask, q_positions=heads.positions, kv_positions=heads.kv_positions
        )

    def _heads(
        self,
        x: Tensor,
        shared: SharedKeys | None,
        mask: object,
        positions: GivenPositions,
        rotary_positions: GivenPositions,
        cache: LayerCache | None,
    ) -> Heads:
        """Check a call, project its queries, and return them with the keys and values of the source."""
        own_key, own_value = (SharedKeys() if shared is None else shared).read()
        weight = weight_of(self.query_projection)
        checks.check_inputs(x, x, x, self.embed_dim, self.embed_dim, None if weight is None else weight.dtype)
        batch, length, _ = x.shape
        key, value, places = own_key, own_value, None
        if positions is not None:
            places = Positions.of(positions, length=length, batch=batch)
        kv_places = places
        if cache is not None:
            key, value = _cached(cache, own_key, own_value)
            stored, start = cache.kv_positions, key.shape[2] - length  # type: ignore[attr-defined]  # a KVCache
            kv_places = Positions.of(stored, "kv_positions", length=key.shape[2], batch=batch)
            if places is None:
                places = Positions.of(stored[start:] if isinstance(stored, range) else stored[..., start:])
        joined = self._joined(mask, (batch, self.num_heads, length, key.shape[2]))
        explicit = checks.checked_rotary_positions(rotary_positions, self.rotary, True, cache)
        lengths = (length, key.shape[2])
        q_rotary_positions, _, temperature_places = rotation_positions(explicit, (places, kv_places), lengths, joined)
        query = self.query_projection(x)
        if self.query_norm is None or self.qk_norm is None:
            query = self._split(query)
            query = query if self.rotary is None else self.rotary(query, q_rotary_positions)
        else:
            query = norm_and_rotate(query, self._split, self.qk_norm, self.query_norm, self.rotary, q_rotary_positions)
        query = with_temperature(query, self.temperature, *temperature_places)
        return Heads(query, key, value, joined, places, kv_places)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)


def _cached(cache: LayerCache, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return all keys and values in the source layer's cache. New keys and values keep their gradients."""
    if type(cache) is not KVCache:
        reason = f"a {type(cache).__name__} does not return all keys and values, as a KVCache does"
        raise unsupported("cache", [reason])
    assert cache.key is not None  # the source has written to it
    assert cache.value is not None
    if not torch.is_grad_enabled():
        return cache.key, cache.value
    earlier = cache.length - key.shape[2]  # later calls write to the cache's memory, which a graph must not contain
    return torch.cat([cache.key[:, :, :earlier], key], 2), torch.cat([cache.value[:, :, :earlier], value], 2)
