"""The sizes of an encoder."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.arguments import integer
from saccade.models.config import Config, Positive, Probability, Token
from saccade.nn.feed_forward import Activation

__all__ = ["EncoderConfig"]


@dataclass(frozen=True)
class EncoderConfig(Config):
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
        integer("EncoderConfig", "pad_token", self.pad_token, 0, below=self.vocab_size, hint=hint)
