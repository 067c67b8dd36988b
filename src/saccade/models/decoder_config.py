"""The sizes of a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from saccade.errors import value_error
from saccade.masks import Causal, Mask
from saccade.masks.algebra import And
from saccade.models.config import Config, Positive, Probability
from saccade.nn.feed_forward import Activation
from saccade.nn.norms import Norm
from saccade.positions import Scaling

__all__ = ["DecoderConfig"]


@dataclass(frozen=True)
class DecoderConfig(Config):
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
        position_encoding: how tokens know where they stand: ``"rotary"``, ``"alibi"`` or ``"learned"``.
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
    position_encoding: Literal["rotary", "alibi", "learned"] = "rotary"
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
        where, heads = "DecoderConfig", self.num_heads
        if heads % self.kv_heads:
            raise value_error(where, "num_kv_heads", f"divide num_heads {heads}", self.num_kv_heads)
        if self.position_encoding != "rotary" and self.rotary_scaling is not None:
            got = f"{self.rotary_scaling} with {self.position_encoding} positions"
            raise value_error(where, "rotary_scaling", "be None unless positions are rotary", got)
        if self.position_encoding == "rotary" and self.embed_dim // heads % 2:
            rule = "be even for rotary positions"
            raise value_error(where, "embed_dim / num_heads", rule, f"{self.embed_dim} / {heads}")

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
