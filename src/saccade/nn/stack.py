"""EncoderStack and DecoderStack: stacks of encoder layers and of decoder layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import NoneType
from typing import Any, TypedDict, Unpack, cast

import torch
from torch import Tensor, nn

from saccade.caches import Cache, LayerCache
from saccade.engine.nested import check_dense
from saccade.matrix import Matrix
from saccade.nn.attention import MultiHeadAttention
from saccade.nn.base_layer import Layer
from saccade.nn.decoder_layer import DecoderLayer
from saccade.nn.encoder_layer import EncoderLayer
from saccade.nn.shared_keys import SharedKeyAttention
from saccade.nn.sharing import caches_per_layer, check_sources, shared_options
from saccade.positions import Bias
from saccade.positions.token_positions import GivenPositions
from saccade.support.argument_hints import ArgumentHints
from saccade.support.errors import value_error
from saccade.support.validation import check_bool, check_type


class _CallOptions(TypedDict, total=False):
    """The keyword arguments of a decoder stack's calls, all None by default; see `DecoderLayer.forward`."""

    mask: object
    context_mask: object
    positions: GivenPositions
    context_positions: GivenPositions
    rotary_positions: GivenPositions
    bias: Tensor | Bias | None


class EncoderStack(ArgumentHints, Layer):
    """A stack of encoder layers.

    Args:
        layers: at least one `EncoderLayer`.
        final_norm: norm for the output of the last layer, which pre-norm layers need.

    Raises:
        TypeError: an entry is not an `EncoderLayer`.
        ValueError: there is no layer.

    Example:
        >>> import torch
        >>> from saccade.nn import FeedForward, MultiHeadAttention
        >>> layers = [EncoderLayer(MultiHeadAttention(8, 2), FeedForward(8, 32)) for _ in range(3)]
        >>> EncoderStack(layers, final_norm=torch.nn.LayerNorm(8))(torch.zeros(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    def __init__(self, layers: Iterable[EncoderLayer], *, final_norm: nn.Module | None = None):
        super().__init__()
        self.layers = _checked(layers, EncoderLayer, final_norm)
        self.final_norm = final_norm

    def forward(
        self,
        x: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        rotary_positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
    ) -> Tensor:
        """Return the stack's output, ``[batch, len, embed_dim]``. For the arguments, see `EncoderLayer.forward`."""
        for layer, rotary_options in zip(self.layers, rotary_arguments(self.layers, rotary_positions), strict=True):
            x = layer(x, mask=mask, positions=positions, bias=bias, **rotary_options)
        return x if self.final_norm is None else self.final_norm(x)

    def matrices(
        self,
        x: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        rotary_positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
    ) -> list[Matrix]:
        """Return the lazy attention matrices of all layers. For the arguments, see `forward`."""
        options = {"mask": mask, "positions": positions, "bias": bias}
        inputs = with_inputs(self.layers, x, rotary_positions=rotary_positions, **options)
        arguments = rotary_arguments(self.layers, rotary_positions)
        return [layer.matrix(x, **options, **added) for (layer, x), added in zip(inputs, arguments, strict=True)]


class DecoderStack(ArgumentHints, Layer):
    r"""A stack of decoder layers.

    Args:
        layers: at least one `DecoderLayer`; either all or none have cross-attention.
        final_norm: norm for the output of the last layer, which pre-norm layers need.
        value_residual: whether every layer after the first mixes the first layer's values into its own, before
            attention and before they are cached: :math:`V'_l = \lambda_{l1} V_1 + \lambda_{l2} V_l`.

    Attributes:
        value_weights: the weights λ, trainable and initially 0.5, ``[layers - 1, 2]``; None without ``value_residual``.

    Raises:
        TypeError: an entry is not a `DecoderLayer`.
        ValueError: there is no layer, only some layers have cross-attention, a layer reads the keys or the selection of
            a layer that does not come before it or does not fit, or values cannot be mixed; in calls, the cache
            belongs to a different model.

    Example:
        >>> import torch
        >>> from saccade.masks import Causal
        >>> from saccade.nn import FeedForward, MultiHeadAttention
        >>> layers = [DecoderLayer(MultiHeadAttention(8, 2, mask=Causal()), FeedForward(8, 32)) for _ in range(3)]
        >>> DecoderStack(layers)(torch.zeros(1, 5, 8)).shape
        torch.Size([1, 5, 8])

    Reference for the value residual: Zhou et al. 2024, arXiv:2410.17897.
    """

    def __init__(
        self, layers: Iterable[DecoderLayer], *, final_norm: nn.Module | None = None, value_residual: bool = False
    ):
        super().__init__()
        self.layers = _checked(layers, DecoderLayer, final_norm)
        if len({layer.cross_attention is not None for layer in self.layers}) > 1:
            rule = "all have cross_attention, or all have none"
            raise value_error("layers", rule, "layers with and without cross_attention")
        check_sources(self.layers)
        if check_bool("value_residual", value_residual):
            _check_value_residual(self.layers)
        weights = torch.full((len(self.layers) - 1, 2), 0.5)
        self.value_weights = nn.Parameter(weights) if value_residual else None
        self.final_norm = final_norm

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
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the output of the decoder stack, ``[batch, len, embed_dim]``.

        Args:
            x, context, mask, context_mask, positions, context_positions, rotary_positions, bias: as in
                `DecoderLayer.forward`, shared by all layers. Layers without rotary ignore ``rotary_positions``.
            cache: the cache of earlier calls, from `new_cache`.
        """
        options = {"mask": mask, "positions": positions, "bias": bias}
        options |= {"context_mask": context_mask, "context_positions": context_positions}
        per_layer = self._layer_options(x, rotary_positions)
        for layer, layer_cache, layer_options in zip(self.layers, self._caches(cache), per_layer, strict=True):
            x = layer(x, context, cache=layer_cache, **options, **layer_options)
        return x if self.final_norm is None else self.final_norm(x)

    def matrices(self, x: Tensor, context: Tensor | None = None, **kwargs: Unpack[_CallOptions]) -> list[Matrix]:
        """Return the lazy self-attention matrices of all layers. For the arguments, see `forward`."""
        options: dict[str, Any] = {name: kwargs.get(name) for name in ("mask", "positions", "bias")}
        per_layer = self._layer_options(x, kwargs.pop("rotary_positions", None))
        matrices = []
        for layer, layer_options in zip(self.layers, per_layer, strict=True):
            matrices.append(_matrix_of(cast(DecoderLayer, layer), x, {**options, **layer_options}))
            x = layer(x, context, **kwargs, **layer_options)
        return matrices

    def cross_matrices(self, x: Tensor, context: Tensor, **kwargs: Unpack[_CallOptions]) -> list[Matrix]:
        """Return the lazy cross-attention matrices of all layers. For the arguments, see `forward`."""
        inputs = with_inputs(self.layers, x, context, **kwargs)
        return [layer.cross_matrix(x, context, **kwargs) for layer, x in inputs]

    def new_cache(self, max_len: int | None = None) -> Cache:
        """Return an empty cache for all layers of the stack, except those that read the keys of an earlier layer.

        Args:
            max_len: number of tokens to allocate memory for in advance; if None, the cache grows as needed.
        """
        cached = (layer for layer in self.layers if not isinstance(layer.attention, SharedKeyAttention))
        return Cache(cast(DecoderLayer, layer).new_cache(max_len) for layer in cached)

    def _layer_options(self, x: Tensor, rotary_positions: GivenPositions) -> list[dict[str, Any]]:
        """Return the keyword arguments that differ between the layers in one call."""
        if self.value_weights is not None:
            check_dense(x=x)
        shared = shared_options(self.layers, self.value_weights)
        both = zip(rotary_arguments(self.layers, rotary_positions), shared, strict=True)
        return [{**rotary_options, **shared_keys} for rotary_options, shared_keys in both]

    def _caches(self, cache: Cache | None) -> Iterable[LayerCache | Cache | None]:
        if cache is None:
            return [None] * len(self.layers)
        hint = "new_cache() of this model makes one"
        check_type("cache", cache, Cache, "be a Cache or None", hint=hint)
        count = sum(not isinstance(layer.attention, SharedKeyAttention) for layer in self.layers)
        if len(cache) != count:
            rule = f"contain the caches of {count} layers"
            raise value_error("cache", rule, len(cache), hint=hint)
        return cache if count == len(self.layers) else caches_per_layer(self.layers, cache)


def _matrix_of(layer: DecoderLayer, x: Tensor, options: dict[str, Any]) -> Matrix:
    """Return the lazy self-attention matrix of a layer, which may read keys or a selection of an earlier layer."""
    if layer.attention.source is not None:
        return layer.attention.matrix(layer.attention_norm(x) if layer.norm_first else x, **options)  # it takes shared
    return layer.matrix(x, **{name: option for name, option in options.items() if name != "shared"})


def _check_value_residual(layers: nn.ModuleList) -> None:
    """Raise an error unless all layers of a stack compute values of the same shape from the same tokens."""
    owns = [layer.attention for layer in layers if layer.cross_attention is None]
    sizes = {(own.num_kv_heads, own.head_dim) for own in owns if isinstance(own, MultiHeadAttention)}
    if len(layers) < 2 or len(sizes) > 1 or not all(isinstance(own, MultiHeadAttention) for own in owns) or not owns:
        rule = "be False unless several layers have a MultiHeadAttention with equal key heads, and no cross_attention"
        raise value_error("value_residual", rule, True)


def rotary_arguments(layers: nn.ModuleList, rotary_positions: GivenPositions) -> list[dict[str, Any]]:
    """Return keyword arguments for each layer, with ``rotary_positions`` only for layers with a rotary embedding.

    Raises:
        ValueError: no layer has a rotary embedding.
    """
    if rotary_positions is None:
        return [{} for _ in layers]
    has_rotary = [getattr(layer.attention, "rotary", None) is not None for layer in layers]
    if not any(has_rotary):
        raise value_error("rotary_positions", "be None in a stack without rotary", "positions")
    return [{"rotary_positions": rotary_positions} if rotates else {} for rotates in has_rotary]


def with_inputs(
    layers: nn.ModuleList, x: Tensor, *others: Any, rotary_positions: GivenPositions = None, **options: Any
) -> Iterator[tuple[Any, Tensor]]:
    """Yield each layer of a stack together with its input, beginning with the first layer and ``x``."""
    for layer, rotary_options in zip(layers, rotary_arguments(layers, rotary_positions), strict=True):
        yield layer, x
        x = layer(x, *others, **options, **rotary_options)


def _checked(layers: Iterable[nn.Module], kind: type[nn.Module], final_norm: nn.Module | None) -> nn.ModuleList:
    check_type("final_norm", final_norm, (nn.Module, NoneType), "be a module or None")
    several = check_type("layers", layers, Iterable, f"be an iterable of {kind.__name__}")
    listed = [check_type("layers", layer, kind, f"be instances of {kind.__name__}") for layer in several]
    if not listed:
        raise value_error("layers", "contain at least one layer", "none")
    return nn.ModuleList(listed)
