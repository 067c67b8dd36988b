"""Stacks of encoder layers and of decoder layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import NoneType
from typing import Any, TypedDict, Unpack, cast

from torch import Tensor, nn

from saccade.caches import Cache, LayerCache
from saccade.matrix import Matrix
from saccade.nn.decoder_layer import DecoderLayer
from saccade.nn.encoder_layer import EncoderLayer
from saccade.nn.typing import Layer
from saccade.positions import Bias
from saccade.positions.token_positions import GivenPositions
from saccade.support.argument_hints import AnswersCalls
from saccade.support.errors import value_error
from saccade.support.validation import check_type

__all__ = ["DecoderStack", "EncoderStack", "with_inputs"]


class Facts(TypedDict, total=False):
    """What a decoder layer may be told of a batch, each None unless it is given; see `DecoderLayer.forward`."""

    mask: object
    encoded_mask: object
    positions: GivenPositions
    encoded_positions: GivenPositions
    bias: Tensor | Bias | None


class EncoderStack(AnswersCalls, Layer):
    """A stack of encoder layers.

    Args:
        layers: `EncoderLayer` each, at least one.
        final_norm: of the last layer's output; where the layers' norms come first, nothing else normalises it.

    Raises:
        TypeError: not an `EncoderLayer`.
        ValueError: no layer.

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
        bias: Tensor | Bias | None = None,
    ) -> Tensor:
        """``[batch, len, embed_dim]`` to the same; arguments as in `EncoderLayer.forward`, for all layers alike."""
        for layer in self.layers:
            x = layer(x, mask=mask, positions=positions, bias=bias)
        return x if self.final_norm is None else self.final_norm(x)

    def matrices(
        self,
        x: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
    ) -> list[Matrix]:
        """The attention matrix of every layer in `forward`, not built."""
        facts = {"mask": mask, "positions": positions, "bias": bias}
        return [layer.matrix(x, **facts) for layer, x in with_inputs(self.layers, x, **facts)]


class DecoderStack(AnswersCalls, Layer):
    """A stack of decoder layers.

    Args:
        layers: `DecoderLayer` each, at least one; all with cross-attention, or none.
        final_norm: of the last layer's output.

    Raises:
        TypeError: not a `DecoderLayer`.
        ValueError: no layer, or some with cross-attention and some without; on use, a cache of another model.

    Example:
        >>> import torch
        >>> from saccade.masks import Causal
        >>> from saccade.nn import FeedForward, MultiHeadAttention
        >>> layers = [DecoderLayer(MultiHeadAttention(8, 2, mask=Causal()), FeedForward(8, 32)) for _ in range(3)]
        >>> DecoderStack(layers)(torch.zeros(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    def __init__(self, layers: Iterable[DecoderLayer], *, final_norm: nn.Module | None = None):
        super().__init__()
        self.layers = _checked(layers, DecoderLayer, final_norm)
        if len({layer.cross_attention is not None for layer in self.layers}) > 1:
            rule = "all have cross_attention, or none"
            raise value_error("layers", rule, "some with and some without")
        self.final_norm = final_norm

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
        cache: Cache | None = None,
    ) -> Tensor:
        """``[batch, len, embed_dim]`` to the same.

        Args:
            x, encoded, mask, encoded_mask, positions, encoded_positions, bias: as in `DecoderLayer.forward`, for all
                layers alike.
            cache: what the layers remember of earlier calls, as `new_cache` makes it.
        """
        facts = {"mask": mask, "positions": positions, "bias": bias}
        facts |= {"encoded_mask": encoded_mask, "encoded_positions": encoded_positions}
        for layer, own in zip(self.layers, self._caches(cache), strict=True):
            x = layer(x, encoded, cache=own, **facts)
        return x if self.final_norm is None else self.final_norm(x)

    def matrices(self, x: Tensor, encoded: Tensor | None = None, **kwargs: Unpack[Facts]) -> list[Matrix]:
        """The self-attention matrix of every layer in `forward`, not built; arguments as there."""
        own = {name: kwargs.get(name) for name in ("mask", "positions", "bias")}
        return [layer.matrix(x, **own) for layer, x in with_inputs(self.layers, x, encoded, **kwargs)]

    def cross_matrices(self, x: Tensor, encoded: Tensor, **kwargs: Unpack[Facts]) -> list[Matrix]:
        """The cross-attention matrix of every layer in `forward`, not built; arguments as there."""
        inputs = with_inputs(self.layers, x, encoded, **kwargs)
        return [layer.cross_matrix(x, encoded, **kwargs) for layer, x in inputs]

    def new_cache(self, max_len: int | None = None) -> Cache:
        """An empty cache for all layers.

        Args:
            max_len: room for so many tokens, taken at once; None to grow.
        """
        return Cache(cast(DecoderLayer, layer).new_cache(max_len) for layer in self.layers)

    def _caches(self, cache: Cache | None) -> Iterable[LayerCache | Cache | None]:
        if cache is None:
            return [None] * len(self.layers)
        hint = "new_cache() of this model makes one"
        check_type("cache", cache, Cache, "be a Cache or None", hint=hint)
        if len(cache) != len(self.layers):
            rule = f"hold the caches of {len(self.layers)} layers"
            raise value_error("cache", rule, len(cache), hint=hint)
        return cache


def with_inputs(layers: nn.ModuleList, x: Tensor, *others: Any, **facts: Any) -> Iterator[tuple[Any, Tensor]]:
    """Each layer, and what it is given where ``x`` goes through all of them."""
    for layer in layers:
        yield layer, x
        x = layer(x, *others, **facts)


def _checked(layers: Iterable[nn.Module], kind: type[nn.Module], final_norm: nn.Module | None) -> nn.ModuleList:
    check_type("final_norm", final_norm, (nn.Module, NoneType), "be a module or None")
    several = check_type("layers", layers, Iterable, f"be several {kind.__name__}")
    listed = [check_type("layers", layer, kind, f"be of kind {kind.__name__}") for layer in several]
    if not listed:
        raise value_error("layers", "hold at least one layer", "none")
    return nn.ModuleList(listed)
