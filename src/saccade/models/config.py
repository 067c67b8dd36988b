"""The sizes of an encoder."""

from dataclasses import dataclass

from saccade.engine import dropout
from saccade.errors import value_error
from saccade.nn.feed_forward import ACTIVATIONS, Activation
from saccade.nn.norms import check_eps

__all__ = ["EncoderConfig"]

_SIZES = (
    "vocab_size",
    "max_len",
    "embed_dim",
    "num_heads",
    "num_layers",
    "feed_forward_dim",
    "num_token_types",
)


@dataclass(frozen=True)
class EncoderConfig:
    """Everything that decides an `Encoder` but its weights.

    Attributes:
        vocab_size: tokens that the model knows.
        max_len: longest sequence, in tokens.
        embed_dim: width of the hidden states.
        num_heads: attention heads per layer; divides ``embed_dim``.
        num_layers: layers.
        feed_forward_dim: width inside the feed-forward networks.
        num_token_types: kinds of segments (first and second sentence).
        activation: of the feed-forward networks, see `saccade.nn.FeedForward`.
        norm_eps: added to the variance in every layer norm.
        dropout_p: of hidden states, in training only.
        attention_dropout_p: of attention weights, in training only.
        pad_token: stands where a sequence of a batch has ended.

    Raises:
        ValueError: a size below 1, heads that do not divide, an unknown activation, a pad token that is none.
        TypeError: a probability that is no number.
    """

    vocab_size: int
    max_len: int
    embed_dim: int
    num_heads: int
    num_layers: int
    feed_forward_dim: int
    num_token_types: int = 2
    activation: Activation = "gelu"
    norm_eps: float = 1e-12
    dropout_p: float = 0.1
    attention_dropout_p: float = 0.1
    pad_token: int = 0

    def __post_init__(self) -> None:
        for name in _SIZES:
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise value_error("EncoderConfig", name, "be an int >= 1", repr(size))
        if self.embed_dim % self.num_heads:
            raise value_error("EncoderConfig", "num_heads", f"divide embed_dim {self.embed_dim}", self.num_heads)
        if not isinstance(self.activation, str) or self.activation not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise value_error("EncoderConfig", "activation", f"be one of {known}", repr(self.activation))
        check_eps("EncoderConfig", self.norm_eps)
        dropout.check(self.dropout_p, "EncoderConfig")
        dropout.check(self.attention_dropout_p, "EncoderConfig")
        pad, is_int = self.pad_token, isinstance(self.pad_token, int) and not isinstance(self.pad_token, bool)
        if not is_int or not 0 <= pad < self.vocab_size:
            rule = f"be an int of at least 0, below vocab_size {self.vocab_size}"
            raise value_error("EncoderConfig", "pad_token", rule, repr(pad))
