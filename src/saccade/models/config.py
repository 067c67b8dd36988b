"""The sizes of every model. The annotation of a field says what it must be."""

from __future__ import annotations

import dataclasses
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from saccade.masks import Causal, Mask
from saccade.masks.algebra import And
from saccade.models.argument_hints import OF_CONFIGS
from saccade.nn.feed_forward import Activation
from saccade.nn.norms import Norm
from saccade.positions import Scaling
from saccade.support.argument_hints import answers_class
from saccade.support.errors import value_error
from saccade.support.validation import check_bool, check_choice, check_int, check_number, check_type

__all__ = ["Config", "DecoderConfig", "EncoderConfig", "EncoderDecoderConfig", "Positive", "Probability"]

Positive = Annotated[float, {"above": 0}]
Probability = Annotated[float, {"least": 0, "below": 1}]
Token = Annotated[int, {"least": 0}]

_NUMBERS: dict[Any, Any] = {bool: check_bool, int: check_int, float: check_number}


@dataclasses.dataclass(frozen=True)
class Config:
    """The base of the frozen dataclasses that hold a model's sizes: each field is checked by its annotation.

    Each has an ``embed_dim`` and a number of heads that divides it.

    An ``int`` is at least 1, a ``bool`` is True or False, a ``Literal`` one of its names; ``| None`` allows None.
    """

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            object.__setattr__(self, field.name, _checked(field.name, given, hints[field.name]))
        width, heads = (getattr(self, name) for name in ("embed_dim", "num_heads"))
        if width % heads:
            raise value_error("num_heads", f"divide embed_dim {width}", heads)


@dataclasses.dataclass(frozen=True)
class TextConfig(Config):
    """The base of the configs of models that read tokens."""

    vocab_size: int
    max_len: int
    embed_dim: int
    num_heads: int


@answers_class(OF_CONFIGS)
@dataclasses.dataclass(frozen=True)
class EncoderConfig(TextConfig):
    """Everything about an `Encoder` but its weights.

    Attributes:
        vocab_size: how many tokens the model knows.
        max_len: the longest sequence, in tokens.
        embed_dim: width of the hidden states.
        num_heads: attention heads per layer; divides ``embed_dim``.
        num_layers: how many layers.
        feed_forward_dim: width inside the feed-forward networks.
        num_token_types: kinds of segments (first and second sentence).
        activation: of the feed-forward networks, see `saccade.nn.FeedForward`.
        norm_eps: added to the variance in every layer norm.
        dropout_p: of hidden states, in training only.
        attention_dropout_p: of attention weights, in training only.
        pad_token: fills up the shorter sequences of a batch.

    Raises:
        ValueError: a size below 1, heads that do not divide, an unknown activation, a pad token outside the vocabulary.
        TypeError: a value of a wrong type.
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


@answers_class(OF_CONFIGS)
@dataclasses.dataclass(frozen=True)
class DecoderConfig(TextConfig):
    """Everything about a `Decoder` but its weights. The defaults are those of Llama.

    Attributes:
        vocab_size: how many tokens the model knows.
        max_len: the longest text that the model is made for, in tokens; a hard limit where position vectors are
            learned, and otherwise the length it was trained on.
        embed_dim: width of the hidden states.
        num_heads: query heads per layer; divides ``embed_dim``.
        num_layers: how many layers.
        feed_forward_dim: width inside the feed-forward networks.
        num_kv_heads: key and value heads per layer; as many as query heads when None.
        mask: which earlier tokens a token sees, such as ``masks.sliding_window(1024)``; all when None. The layers
            get `causal_mask`, which hides later tokens whatever this mask allows.
        position_encoding: how tokens know where they stand: ``"rotary"``, ``"alibi"``, ``"learned"``, or
            ``"relative"``, for which each head has a vector for each distance below ``max_len``, added to its keys: see
            `saccade.positions.ShawKeys`.
        rotary_base, rotary_scaling: of rotary positions; see `saccade.positions.Rotary`.
        activation, gated, feed_forward_bias: of the feed-forward networks; see `saccade.nn.FeedForward`.
        attention_bias: whether the projections of the attention have a bias.
        norm, norm_eps: see `saccade.nn.EncoderLayer`; the norms come first.
        tied: whether the embedding and the projection to the vocabulary share their weights.
        dropout_p: of embeddings and of what each part of a layer adds, in training only.
        attention_dropout_p: of attention weights, in training only.
        end_tokens: tokens that end a text; for whoever generates one.

    Raises:
        ValueError: a size below 1, heads that do not divide, an unknown name.
        TypeError: a value of a wrong type.
    """

    num_layers: int
    feed_forward_dim: int
    num_kv_heads: int | None = None
    mask: Mask | None = None
    position_encoding: Literal["rotary", "alibi", "learned", "relative"] = "rotary"
    rotary_base: float = 10000.0
    rotary_scaling: Scaling | None = None
    activation: Activation = "silu"
    gated: bool = True
    norm: Norm = "rms"
    norm_eps: Positive = 1e-5
    attention_bias: bool = False
    feed_forward_bias: bool = False
    tied: bool = True
    dropout_p: Probability = 0.0
    attention_dropout_p: Probability = 0.0
    end_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        heads = self.num_heads
        if heads % self.kv_heads:
            raise value_error("num_kv_heads", f"divide num_heads {heads}", self.num_kv_heads)
        if self.position_encoding != "rotary" and self.rotary_scaling is not None:
            got = f"{self.rotary_scaling} with {self.position_encoding} positions"
            raise value_error("rotary_scaling", "be None unless positions are rotary", got)
        if self.position_encoding == "rotary" and self.embed_dim // heads % 2:
            rule = "be even for rotary positions"
            raise value_error("embed_dim / num_heads", rule, f"{self.embed_dim} / {heads}")

    @property
    def kv_heads(self) -> int:
        """Key and value heads: ``num_kv_heads``, or as many as query heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def causal_mask(self) -> Mask:
        """Who may attend to whom: ``mask``, and never a later token."""
        if self.mask is None:
            return Causal()
        parts = self.mask.parts if isinstance(self.mask, And) else (self.mask,)
        return self.mask if Causal() in parts else Causal() & self.mask


@answers_class(OF_CONFIGS)
@dataclasses.dataclass(frozen=True)
class EncoderDecoderConfig(TextConfig):
    """Everything about an `EncoderDecoder` but its weights. The defaults are those of the first paper.

    Attributes:
        vocab_size: how many tokens the model knows; both texts share them.
        max_len: the longest text that the model is made for; a hard limit where position vectors are learned.
        embed_dim: width of the hidden states.
        num_heads: heads per attention; divides ``embed_dim``.
        num_encoder_layers, num_decoder_layers: how many layers read, and how many write.
        feed_forward_dim: width inside the feed-forward networks.
        position_encoding: ``"sinusoidal"``, ``"learned"`` or ``"rotary"`` (in self-attention; cross-attention has
            no positions).
        activation, gated: of the feed-forward networks; see `saccade.nn.FeedForward`.
        norm, norm_eps, norm_first: see `saccade.nn.EncoderLayer`.
        dropout_p: of embeddings and of what each part of a layer adds, in training only.
        attention_dropout_p: of attention weights, in training only.
        end_tokens: tokens that end a text; for whoever generates one.

    Raises:
        ValueError: a size below 1, heads that do not divide, an unknown name.
        TypeError: a value of a wrong type.
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


def _checked(name: str, value: Any, kind: Any) -> Any:
    """A value that is what its annotation says."""
    origin, inner = get_origin(kind), get_args(kind)
    if NoneType in inner:
        return None if value is None else _checked(name, value, inner[0])
    if origin is Literal:
        return check_choice(name, value, inner)
    if origin is tuple:
        given = check_type(name, value, tuple, "be a tuple of ints")
        return tuple(check_int(name, one, None) for one in given)
    kind, limits = inner if origin is Annotated else (kind, {})
    if kind in _NUMBERS:
        return _NUMBERS[kind](name, value, **limits)
    return check_type(name, value, kind, f"be a {kind.__name__} or None")
