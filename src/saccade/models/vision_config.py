"""The sizes of the models that look at pictures."""

from __future__ import annotations

import dataclasses
from typing import Literal

from saccade.masks import Mask
from saccade.models.argument_hints import OF_CONFIGS
from saccade.models.config import Config, Positive, Probability
from saccade.nn.feed_forward import Activation
from saccade.support.argument_hints import answers_class
from saccade.support.errors import value_error

__all__ = ["SetDecoderConfig", "VisionTransformerConfig"]


@answers_class(OF_CONFIGS)
@dataclasses.dataclass(frozen=True)
class VisionTransformerConfig(Config):
    """Everything about a `VisionTransformer` but its weights.

    Attributes:
        image_size: height and width of the pictures, multiples of ``patch_size``; with sinusoidal positions pictures
            may have other sizes too.
        patch_size: side of the squares that a picture is cut into.
        embed_dim: width of the hidden states.
        num_heads: heads per layer; divides ``embed_dim``.
        num_layers: how many layers.
        feed_forward_dim: width inside the feed-forward networks.
        channels: of the pictures.
        num_classes: what the head tells apart; no head when None.
        class_token: whether a token that is no patch stands before the patches.
        position_encoding: ``"learned"``, a vector for each token; or ``"sinusoidal"``, waves of row and column.
        pooling: which vector stands for a picture: the ``"class_token"``'s, or the ``"mean"`` of the patches'.
        mask: which tokens see which, such as ``masks.Neighborhood(14, 14, 3).after(1)``; all see all when None.
        embedding_norm: whether a layer norm stands before the first layer, as in CLIP.
        patch_bias: whether the projection of the patches has a bias.
        activation: of the feed-forward networks, see `saccade.nn.FeedForward`.
        norm_eps: added to the variance in every layer norm; the norms come first.
        dropout_p: of embeddings and of what each part of a layer adds, in training only.
        attention_dropout_p: of attention weights, in training only.

    Raises:
        ValueError: a size below 1, heads or patches that do not divide, an unknown name, a class token that is pooled
            and is not there.
        TypeError: a value of a wrong type.
    """

    image_size: tuple[int, ...]
    patch_size: int
    embed_dim: int
    num_heads: int
    num_layers: int
    feed_forward_dim: int
    channels: int = 3
    num_classes: int | None = None
    class_token: bool = True
    position_encoding: Literal["learned", "sinusoidal"] = "learned"
    pooling: Literal["class_token", "mean"] = "class_token"
    mask: Mask | None = None
    embedding_norm: bool = False
    patch_bias: bool = True
    activation: Activation = "gelu"
    norm_eps: Positive = 1e-6
    dropout_p: Probability = 0.0
    attention_dropout_p: Probability = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        side = self.patch_size
        if len(self.image_size) != 2 or any(own < 1 or own % side for own in self.image_size):
            rule = f"be a height and a width, multiples of patch_size {side}"
            raise value_error("image_size", rule, self.image_size)
        if self.position_encoding == "sinusoidal" and self.embed_dim % 4:
            hint = "rows and columns have a sine and a cosine for each wave"
            raise value_error("embed_dim", "be a multiple of 4 for sinusoidal positions", self.embed_dim, hint=hint)
        if self.pooling == "class_token" and not self.class_token:
            raise value_error("pooling", "be 'mean' where there is no class token", self.pooling)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        height, width = self.image_size
        return height // self.patch_size, width // self.patch_size

    @property
    def patch_len(self) -> int:
        """How many numbers a patch is."""
        return self.channels * self.patch_size**2

    @property
    def num_tokens(self) -> int:
        """Patches, and the class token if there is one."""
        rows, columns = self.grid
        return rows * columns + self.class_token


@answers_class(OF_CONFIGS)
@dataclasses.dataclass(frozen=True)
class SetDecoderConfig(Config):
    """Everything about a `SetDecoder` but its weights and its backbone. The defaults are those of DETR.

    Attributes:
        channels: of the feature map.
        num_classes: kinds of objects; that nothing is there is one more.
        num_queries: the most objects that are found in a picture.
        embed_dim: width of the hidden states, a multiple of 4.
        num_heads: heads per attention; divides ``embed_dim``.
        num_encoder_layers, num_decoder_layers: how many layers look at the picture, and how many find objects.
        feed_forward_dim: width inside the feed-forward networks.
        activation: of the feed-forward networks, see `saccade.nn.FeedForward`.
        norm_eps, norm_first: see `saccade.nn.EncoderLayer`.
        dropout_p: of the features and of what each part of a layer adds, in training only.
        attention_dropout_p: of attention weights, in training only.

    Raises:
        ValueError: a size below 1, heads that do not divide, an unknown name.
        TypeError: a value of a wrong type.
    """

    channels: int
    num_classes: int
    num_queries: int
    embed_dim: int
    num_heads: int
    num_encoder_layers: int
    num_decoder_layers: int
    feed_forward_dim: int
    activation: Activation = "relu"
    norm_eps: Positive = 1e-5
    norm_first: bool = False
    dropout_p: Probability = 0.1
    attention_dropout_p: Probability = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embed_dim % 4:
            hint = "rows and columns have a sine and a cosine for each wave"
            raise value_error("embed_dim", "be a multiple of 4", self.embed_dim, hint=hint)
