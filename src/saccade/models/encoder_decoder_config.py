"""The sizes of an encoder-decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from saccade.models.config import Config, Positive, Probability
from saccade.nn.feed_forward import Activation
from saccade.nn.norms import Norm

__all__ = ["EncoderDecoderConfig"]


@dataclass(frozen=True)
class EncoderDecoderConfig(Config):
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
