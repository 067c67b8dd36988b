"""The sizes of a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from saccade.engine import dropout
from saccade.errors import type_error, value_error
from saccade.masks import Causal, Mask
from saccade.masks.algebra import And
from saccade.nn.feed_forward import ACTIVATIONS, Activation
from saccade.nn.norms import NORMS, Norm, check_eps
from saccade.positions import Scaling

__all__ = ["DecoderConfig"]

_SIZES = ("vocab_size", "max_len", "embed_dim", "num_heads", "num_layers", "feed_forward_dim")
_SWITCHES = ("gated", "attention_bias", "feed_forward_bias", "tied")
_ENCODINGS = ("rotary", "alibi", "learned")


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that decides a `Decoder` but its weights. What is not said is as in Llama.

    Attributes:
        vocab_size: tokens that the model knows.
        max_len: the longest text that it is made for, in tokens; a limit where position vectors are learned, and
            otherwise what it was trained on.
        embed_dim: width of the hidden states.
        num_heads: query heads per layer; divides ``embed_dim``.
        num_layers: layers.
        feed_forward_dim: width inside the feed-forward networks.
        num_kv_heads: key and value heads per layer; as many as query heads when None.
        mask: which earlier tokens a token sees, such as ``masks.sliding_window(1024)``; all when None. What it allows
            of later tokens is not seen: `causal_mask` is what the layers get.
        position_encoding: how tokens know where they stand: ``"rotary"``, ``"alibi"`` or ``"learned"``.
        rotary_base, rotary_scaling: of rotary positions; see `saccade.positions.Rotary`.
        activation, gated, feed_forward_bias: of the feed-forward networks; see `saccade.nn.FeedForward`.
        attention_bias: whether the projections of the attention have a bias.
        norm, norm_eps: see `saccade.nn.EncoderLayer`; the norms come first.
        tied: whether the vectors that tokens come in as are those that they are told by.
        dropout_p: of embeddings and of what each part of a layer adds, in training only.
        attention_dropout_p: of attention weights, in training only.
        end_tokens: tokens after which a text is at its end; for whoever generates one.

    Raises:
        ValueError: a size below 1, heads that do not divide, an unknown name.
        TypeError: a mask or scaling that is none, a switch that is neither True nor False.
    """

    vocab_size: int
    max_len: int
    embed_dim: int
    num_heads: int
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
    norm_eps: float = 1e-5
    attention_bias: bool = False
    feed_forward_bias: bool = False
    tied: bool = True
    dropout_p: float = 0.0
    attention_dropout_p: float = 0.0
    end_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        where = "DecoderConfig"
        for name in _SIZES:
            _check_count(name, getattr(self, name))
        if self.num_kv_heads is not None:
            _check_count("num_kv_heads", self.num_kv_heads)
        if self.embed_dim % self.num_heads:
            raise value_error(where, "num_heads", f"divide embed_dim {self.embed_dim}", self.num_heads)
        if self.num_heads % self.kv_heads:
            raise value_error(where, "num_kv_heads", f"divide num_heads {self.num_heads}", self.num_kv_heads)
        self._check_words()
        self._check_positions()
        check_eps(where, self.norm_eps)
        dropout.check(self.dropout_p, where)
        dropout.check(self.attention_dropout_p, where)
        if not isinstance(self.end_tokens, tuple) or not all(
            isinstance(token, int) and not isinstance(token, bool) for token in self.end_tokens
        ):
            raise type_error(where, "end_tokens", "be a tuple of ints", repr(self.end_tokens))

    @property
    def kv_heads(self) -> int:
        """Key and value heads, as many as query heads where nothing else is said."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def causal_mask(self) -> Mask:
        """Who may attend to whom: ``mask``, but no one to what comes later."""
        if self.mask is None:
            return Causal()
        parts = self.mask.parts if isinstance(self.mask, And) else (self.mask,)
        return self.mask if Causal() in parts else Causal() & self.mask

    def _check_words(self) -> None:
        where = "DecoderConfig"
        names = (("position_encoding", _ENCODINGS), ("activation", tuple(ACTIVATIONS)), ("norm", tuple(NORMS)))
        for name, known in names:
            if getattr(self, name) not in known:
                raise value_error(where, name, f"be one of {', '.join(known)}", repr(getattr(self, name)))
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise type_error(where, name, "be True or False", repr(getattr(self, name)))
        for name, kind in (("mask", Mask), ("rotary_scaling", Scaling)):
            given = getattr(self, name)
            if given is not None and not isinstance(given, kind):
                raise type_error(where, name, f"be a {kind.__name__} or None", type(given).__name__)

    def _check_positions(self) -> None:
        where = "DecoderConfig"
        if self.position_encoding != "rotary" and self.rotary_scaling is not None:
            got = f"{self.rotary_scaling} with {self.position_encoding} positions"
            raise value_error(where, "rotary_scaling", "be None unless positions are rotary", got)
        if self.position_encoding == "rotary" and (self.embed_dim // self.num_heads) % 2:
            got = f"{self.embed_dim} / {self.num_heads}"
            raise value_error(where, "embed_dim / num_heads", "be even for rotary positions", got)


def _check_count(name: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise value_error("DecoderConfig", name, "be an int of at least 1", repr(size))
