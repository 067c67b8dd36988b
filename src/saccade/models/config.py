"""Configs of all models except decoders. The annotation of each field states its type and range."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from saccade.masks import Mask
from saccade.nn.feed_forward import Activation
from saccade.nn.norms import Norm
from saccade.support.argument_hints import FOREIGN_NAMES, argument_hints
from saccade.support.errors import value_error
from saccade.support.validation import check_bool, check_choice, check_int, check_number, check_type

Positive = Annotated[float, (("above", 0),)]
Probability = Annotated[float, (("least", 0), ("below", 1))]
Token = Annotated[int, (("least", 0),)]

_NUMBERS: dict[Any, Any] = {bool: check_bool, int: check_int, float: check_number}
MODEL_NAMES: Mapping[str, str] = {
    **FOREIGN_NAMES,
    **dict.fromkeys(("vocab", "num_tokens", "n_vocab"), "vocab_size="),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "block_size", "context_length", "seq_len"), "max_len="),
    "n_embd": "embed_dim=",
    "n_head": "num_heads=",
    **dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer", "depth", "layers"), "num_layers="),
    **dict.fromkeys(
        ("dim_feedforward", "intermediate_size", "ffn_dim", "hidden_dim", "mlp_dim", "n_inner"), "feed_forward_dim="
    ),
    **dict.fromkeys(("hidden_dropout_prob", "resid_pdrop"), "dropout_p="),
    **dict.fromkeys(("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"), "attention_dropout_p="),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), "norm_eps="),
    **dict.fromkeys(("hidden_act", "activation_function"), "activation="),
    "tie_word_embeddings": "tied=",
    "rope_theta": "rotary_base=",
    "rope_scaling": "rotary_scaling=",
    "eos_token_id": "end_tokens=",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The base class of all model configs: a frozen dataclass whose fields are checked against their annotations.

    Each config has an ``embed_dim`` and a ``num_heads`` that divides it. An ``int`` field must be at least 1, a
    ``bool`` field True or False, and a ``Literal`` field one of the listed names; ``| None`` also allows None.
    """

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for field in dataclasses.fields(self):
            value = _checked(field.name, getattr(self, field.name), hints[field.name])
            object.__setattr__(self, field.name, value)
        width, heads = (getattr(self, name) for name in ("embed_dim", "num_heads"))
        if width % heads and getattr(self, "head_dim", None) is None:
            raise value_error("num_heads", f"divide embed_dim {width}", heads)


@dataclasses.dataclass(frozen=True)
class TextConfig(Config):
    """The base class of text model configs."""

    vocab_size: int
    max_len: int
    embed_dim: int
    num_heads: int


@argument_hints(MODEL_NAMES)
@dataclasses.dataclass(frozen=True)
class EncoderConfig(TextConfig):
    """The config of an `Encoder`.

    Attributes:
        vocab_size: number of tokens in the vocabulary.
        max_len: length of the longest sequence.
        embed_dim: width of the hidden states.
        num_heads: number of attention heads per layer; divides ``embed_dim``.
        num_layers: number of layers.
        feed_forward_dim: width inside the feed-forward networks.
        num_token_types: number of segment types (such as first and second sentence).
        activation: activation of the feed-forward networks, see `saccade.nn.FeedForward`.
        norm_eps: added to the variance in every layer norm.
        dropout_p: dropout of hidden states, in training only.
        attention_dropout_p: dropout of attention weights, in training only.
        pad_token: the token that pads shorter sequences in a batch.

    Raises:
        ValueError: a size is below 1, ``num_heads`` does not divide ``embed_dim``, the activation is unknown, or the
            pad token is outside the vocabulary.
        TypeError: a value has the wrong type.
    """

    num_layers: int
    feed_forward_dim: int
    num_token_types: int = 2
    activation: Activation = "gelu"
    norm_eps: Positive = 1e-12
    dropout_p: Probability = 0.1
    attention_dropout_p: Probability = 0.1
    pad_token: Token = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        hint = f"vocab_size is {self.vocab_size}"
        check_int("pad_token", self.pad_token, 0, below=self.vocab_size, hint=hint)


@argument_hints(MODEL_NAMES)
@dataclasses.dataclass(frozen=True)
class EncoderDecoderConfig(TextConfig):
    """The config of an `EncoderDecoder`. The defaults are those of the original Transformer paper.

    Attributes:
        vocab_size: number of tokens in the vocabulary that both sequences share.
        max_len: length of the longest sequence. With learned position embeddings, it is a hard limit.
        embed_dim: width of the hidden states.
        num_heads: number of heads in each attention module; divides ``embed_dim``.
        num_encoder_layers, num_decoder_layers: number of layers in each stack.
        feed_forward_dim: width inside the feed-forward networks.
        position_encoding: ``"sinusoidal"``, ``"learned"`` or ``"rotary"`` (in self-attention; cross-attention uses
            no positions).
        activation, gated: options of the feed-forward networks; see `saccade.nn.FeedForward`.
        norm, norm_eps, norm_first: see `saccade.nn.EncoderLayer`.
        dropout_p: dropout of embeddings and of the output of each part of a layer, in training only.
        attention_dropout_p: dropout of attention weights, in training only.
        end_tokens: tokens that end a sequence; pass them to `generate`.

    Raises:
        ValueError: a size is below 1, ``num_heads`` does not divide ``embed_dim``, or a name is unknown.
        TypeError: a value has the wrong type.
    """

    num_encoder_layers: int
    num_decoder_layers: int
    feed_forward_dim: int
    position_encoding: Literal["sinusoidal", "learned", "rotary"] = "sinusoidal"
    activation: Activation = "relu"
    gated: bool = False
    norm: Norm = "layer"
    norm_eps: Positive = 1e-5
    norm_first: bool = False
    dropout_p: Probability = 0.1
    attention_dropout_p: Probability = 0.0
    end_tokens: tuple[int, ...] = ()


@argument_hints(MODEL_NAMES)
@dataclasses.dataclass(frozen=True)
class VisionTransformerConfig(Config):
    """The config of a `VisionTransformer`.

    Attributes:
        image_size: height and width of the images, multiples of ``patch_size``; with sinusoidal positions, other sizes
            are also accepted.
        patch_size: side of the square patches.
        embed_dim: width of the hidden states.
        num_heads: number of attention heads per layer; divides ``embed_dim``.
        num_layers: number of layers.
        feed_forward_dim: width inside the feed-forward networks.
        channels: number of image channels.
        num_classes: number of classifier outputs; None for no classifier.
        class_token: whether a class token precedes the patches.
        position_encoding: ``"learned"`` (one vector per token) or ``"sinusoidal"`` (sinusoids of row and column).
        pooling: how an image becomes one vector: from the ``"class_token"`` or from the ``"mean"`` of the patches.
        mask: which tokens may attend to which others, such as ``masks.Neighborhood(14, 14, 3).after(1)``; None for all.
        embedding_norm: whether a layer norm precedes the first layer, as in CLIP.
        patch_bias: whether the projection of the patches has a bias.
        activation: activation of the feed-forward networks, see `saccade.nn.FeedForward`.
        norm_eps: added to the variance in every layer norm. Layers are pre-norm.
        dropout_p: dropout of embeddings and of the output of each part of a layer, in training only.
        attention_dropout_p: dropout of attention weights, in training only.

    Raises:
        ValueError: a size is below 1, heads or patches do not divide evenly, a name is unknown, or ``pooling`` is
            ``"class_token"`` without a class token.
        TypeError: a value has the wrong type.
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
        if len(self.image_size) != 2 or any(length < 1 or length % side for length in self.image_size):
            rule = f"be a height and a width, multiples of patch_size {side}"
            raise value_error("image_size", rule, self.image_size)
        if self.position_encoding == "sinusoidal" and self.embed_dim % 4:
            hint = "rows and columns each need a sine and a cosine per frequency"
            raise value_error("embed_dim", "be a multiple of 4 for sinusoidal positions", self.embed_dim, hint=hint)
        if self.pooling == "class_token" and not self.class_token:
            raise value_error("pooling", "be 'mean' without a class token", self.pooling)

    @property
    def grid(self) -> tuple[int, int]:
        """The numbers of rows and columns of patches in an image."""
        height, width = self.image_size
        return height // self.patch_size, width // self.patch_size

    @property
    def patch_len(self) -> int:
        """Number of values in a flattened image patch."""
        return self.channels * self.patch_size**2

    @property
    def num_tokens(self) -> int:
        """Number of tokens in an image: its patches, plus one if there is a class token."""
        rows, columns = self.grid
        return rows * columns + self.class_token


@argument_hints(MODEL_NAMES)
@dataclasses.dataclass(frozen=True)
class SetDecoderConfig(Config):
    """The config of a `SetDecoder`. The defaults are those of DETR.

    Attributes:
        channels: number of channels of the feature map.
        num_classes: number of object classes, not counting "no object".
        num_queries: number of queries, which is the maximum number of objects that can be detected in an image.
        embed_dim: width of the hidden states, a multiple of 4.
        num_heads: number of heads in each attention module; divides ``embed_dim``.
        num_encoder_layers, num_decoder_layers: number of layers in each stack.
        feed_forward_dim: width inside the feed-forward networks.
        activation: activation of the feed-forward networks, see `saccade.nn.FeedForward`.
        norm_eps, norm_first: see `saccade.nn.EncoderLayer`.
        dropout_p: dropout of the features and of the output of each part of a layer, in training only.
        attention_dropout_p: dropout of attention weights, in training only.

    Raises:
        ValueError: a size is below 1, ``num_heads`` does not divide ``embed_dim``, or a name is unknown.
        TypeError: a value has the wrong type.
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
            hint = "rows and columns each need a sine and a cosine per frequency"
            raise value_error("embed_dim", "be a multiple of 4", self.embed_dim, hint=hint)


def _checked(name: str, value: Any, kind: Any) -> Any:
    """Check the value of a config field against the field's annotation, and return the value."""
    origin, inner = get_origin(kind), get_args(kind)
    if NoneType in inner:
        return None if value is None else _checked(name, value, inner[0])
    if origin is Literal:
        return check_choice(name, value, inner)
    if origin is tuple and inner[0] is not int:
        return tuple(_checked(name, each, inner[0]) for each in check_type(name, value, tuple, "be a tuple or None"))
    if origin is tuple:
        return tuple(check_int(name, each, None) for each in check_type(name, value, tuple, "be a tuple of ints"))
    kind, limits = inner if origin is Annotated else (kind, ())
    if kind in _NUMBERS:
        return _NUMBERS[kind](name, value, **dict(limits))
    return check_type(name, value, kind, f"be a {kind.__name__} or None")
