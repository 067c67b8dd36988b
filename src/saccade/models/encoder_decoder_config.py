"""The sizes of an encoder-decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from saccade.engine import dropout
from saccade.errors import type_error, value_error
from saccade.nn.feed_forward import ACTIVATIONS, Activation
from saccade.nn.norms import NORMS, Norm, check_eps

__all__ = ["EncoderDecoderConfig"]

_SIZES = (
    "vocab_size",
    "max_len",
    "embed_dim",
    "num_heads",
    "num_encoder_layers",
    "num_decoder_layers",
    "feed_forward_dim",
)
_ENCODINGS = ("sinusoidal", "learned", "rotary")


@dataclass(frozen=True)
class EncoderDecoderConfig:
    """Everything that decides an `EncoderDecoder` but its weights. What is not said is as in the first paper.

    Attributes:
        vocab_size: tokens that the model knows, of both texts.
        max_len: the longest text that it is made for; a limit where position vectors are learned.
        embed_dim: width of the hidden states.
        num_heads: heads per attention; divides ``embed_dim``.
        num_encoder_layers, num_decoder_layers: layers that read, and layers that write.
        feed_forward_dim: width inside the feed-forward networks.
        position_encoding: ``"sinusoidal"``, ``"learned"`` or ``"rotary"`` (in self-attention; cross-attention knows
            no positions).
        activation, gated: of the feed-forward networks; see `saccade.nn.FeedForward`.
        norm, norm_eps, norm_first: see `saccade.nn.EncoderLayer`.
        dropout_p: of embeddings and of what each part of a layer adds, in training only.
        attention_dropout_p: of attention weights, in training only.
        end_tokens: tokens after which a text is at its end; for whoever generates one.

    Raises:
        ValueError: a size below 1, heads that do not divide, an unknown name.
        TypeError: a switch that is neither True nor False.
    """

    vocab_size: int
    max_len: int
    embed_dim: int
    num_heads: int
    num_encoder_layers: int
    num_decoder_layers: int
    feed_forward_dim: int
    position_encoding: Literal["sinusoidal", "learned", "rotary"] = "sinusoidal"
    activation: Activation = "relu"
    gated: bool = False
    norm: Norm = "layer"
    norm_eps: float = 1e-5
    norm_first: bool = False
    dropout_p: float = 0.1
    attention_dropout_p: float = 0.0
    end_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        where = "EncoderDecoderConfig"
        for name in _SIZES:
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise value_error(where, name, "be an int of at least 1", repr(size))
        if self.embed_dim % self.num_heads:
            raise value_error(where, "num_heads", f"divide embed_dim {self.embed_dim}", self.num_heads)
        names = (("position_encoding", _ENCODINGS), ("activation", tuple(ACTIVATIONS)), ("norm", tuple(NORMS)))
        for name, known in names:
            if getattr(self, name) not in known:
                raise value_error(where, name, f"be one of {', '.join(known)}", repr(getattr(self, name)))
        for name in ("gated", "norm_first"):
            if not isinstance(getattr(self, name), bool):
                raise type_error(where, name, "be True or False", repr(getattr(self, name)))
        dropout.check(self.dropout_p, where)
        dropout.check(self.attention_dropout_p, where)
        check_eps(where, self.norm_eps)
        if not isinstance(self.end_tokens, tuple) or not all(
            isinstance(token, int) and not isinstance(token, bool) for token in self.end_tokens
        ):
            raise type_error(where, "end_tokens", "be a tuple of ints", repr(self.end_tokens))
