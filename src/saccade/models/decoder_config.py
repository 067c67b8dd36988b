"""DecoderConfig, the config of decoders, and LayerPattern, the choices that differ between layers."""

from __future__ import annotations

import dataclasses
from types import NoneType
from typing import Literal

from saccade.masks import Causal, Mask
from saccade.masks.algebra import And
from saccade.models.config import MODEL_NAMES, Positive, Probability, TextConfig
from saccade.nn.feed_forward import Activation
from saccade.nn.norms import Norm
from saccade.nn.qk_norm import QKNorm
from saccade.positions import QueryTemperature, Scaling
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import shown, value_error
from saccade.support.validation import are_integers, check_bool, check_number, check_type


@argument_hints(MODEL_NAMES)
@dataclasses.dataclass(frozen=True)
class LayerPattern:
    """The mask, the positions and the feed-forward network of one layer, for decoders whose layers differ.

    Attributes:
        mask: which earlier tokens a token may attend to, such as ``masks.sliding_window(1024)``; None for all.
        rotary: whether the layer rotates queries and keys. If not, the order of tokens affects the layer only through
            the causal mask.
        rotary_base, rotary_scaling: see `saccade.positions.Rotary`.
        temperature: a position-dependent factor for queries, or None; see `saccade.positions.QueryTemperature`.
        uses_qk_norm: whether the layer norms queries and keys, if the config has a ``qk_norm``.
        uses_experts: whether the layer has a mixture of experts, if the config has ``num_experts``.

    Raises:
        ValueError, TypeError: a value has the wrong type or is out of range.
    """

    mask: Mask | None = None
    rotary: bool = True
    rotary_base: float = 10000.0
    rotary_scaling: Scaling | None = None
    temperature: QueryTemperature | None = None
    uses_qk_norm: bool = True
    uses_experts: bool = True

    def __post_init__(self) -> None:
        kinds = (QueryTemperature, NoneType)
        check_type("temperature", self.temperature, kinds, "be a saccade QueryTemperature or None")
        check_type("mask", self.mask, (Mask, NoneType), "be a saccade mask or None")
        for name in ("rotary", "uses_qk_norm", "uses_experts"):
            check_bool(name, getattr(self, name))
        check_number("rotary_base", self.rotary_base, above=1)
        check_type("rotary_scaling", self.rotary_scaling, (Scaling, NoneType), "be a scaling, or None")


@argument_hints(MODEL_NAMES)
@dataclasses.dataclass(frozen=True)
class DecoderConfig(TextConfig):
    """The config of a `Decoder`. The defaults are those of Llama.

    Attributes:
        vocab_size: number of tokens in the vocabulary.
        max_len: length of the longest sequence. With learned position embeddings, it is a hard limit; without, it is
            the length of the training sequences.
        embed_dim: width of the hidden states.
        num_heads: number of query heads per layer; divides ``embed_dim``.
        num_layers: number of layers.
        feed_forward_dim: width inside the feed-forward networks.
        num_kv_heads: number of key and value heads per layer; ``num_heads`` if None.
        head_dim: width of a head; ``embed_dim / num_heads`` if None.
        qk_norm: norms of queries and keys, or None; see `saccade.nn.QKNorm`.
        short_convolution: number of positions that a convolution of queries, keys and values reads; None for no
            convolution.
        attention_scale, softcap: options of the scores; see `saccade.AttentionMatrix`.
        mask: which earlier tokens a token may attend to, such as ``masks.sliding_window(1024)``; None for all. Later
            tokens are always masked; see `causal_mask`.
        position_encoding: ``"rotary"``, ``"alibi"``, ``"learned"`` or ``"relative"``. With ``"relative"``, each head
            adds a vector for each distance below ``max_len`` to its keys; see `saccade.positions.ShawKeys`.
        rotary_base, rotary_scaling, rotary_layout: options of rotary positions; see `saccade.positions.Rotary`.
        layers: the patterns of the layers if they differ, repeated in this order up to ``num_layers``; ``mask`` and
            ``rotary_scaling`` must then be None. If None, all layers are alike.
        kv_layers: for each layer, the index of the layer whose keys and values it reads: its own index, or that of an
            earlier layer with its own keys and values (as in Gemma 3n); see `saccade.nn.SharedKeyAttention`. If None,
            each layer has its own keys and values.
        value_residual: whether every layer after the first mixes the first layer's values into its own; see
            `saccade.nn.DecoderStack`. ``kv_layers`` must then be None.
        activation, gated, feed_forward_bias: options of the feed-forward networks; see `saccade.nn.FeedForward`.
        num_experts: number of experts in each layer with a mixture of experts; None for no such layers. See
            `saccade.nn.MixtureOfExperts`; ``gated`` must then be True and ``feed_forward_bias`` False.
        num_chosen_experts: number of experts that each token chooses.
        expert_dim: inner width of the experts; ``feed_forward_dim`` if None.
        attention_bias: whether the projections of the attention have a bias.
        norm, norm_eps: see `saccade.nn.EncoderLayer`.
        norm_first, part_norm, parallel: see `saccade.nn.DecoderLayer`.
        embedding_scale: factor that multiplies the embeddings before the first layer.
        logit_scale, logit_softcap: factor that multiplies the logits, and the bound to which a tanh limits them
            (None for no bound).
        tied: whether the embedding and the projection to the vocabulary share their weights.
        dropout_p: dropout of embeddings and of the output of each part of a layer, in training only.
        attention_dropout_p: dropout of attention weights, in training only.
        end_tokens: tokens that end a sequence; pass them to `generate`.

    Raises:
        ValueError: a size is below 1, ``num_heads`` does not divide ``embed_dim``, or a name is unknown.
        TypeError: a value has the wrong type.
    """

    num_layers: int
    feed_forward_dim: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    qk_norm: QKNorm | None = None
    short_convolution: int | None = None
    attention_scale: Positive | None = None
    softcap: Positive | None = None
    mask: Mask | None = None
    position_encoding: Literal["rotary", "alibi", "learned", "relative"] = "rotary"
    rotary_base: float = 10000.0
    rotary_scaling: Scaling | None = None
    rotary_layout: Literal["half", "interleaved"] = "half"
    layers: tuple[LayerPattern, ...] | None = None
    kv_layers: tuple[int, ...] | None = None
    value_residual: bool = False
    activation: Activation = "silu"
    gated: bool = True
    num_experts: int | None = None
    num_chosen_experts: int = 1
    expert_dim: int | None = None
    norm: Norm = "rms"
    norm_eps: Positive = 1e-5
    norm_first: bool = True
    part_norm: bool = False
    parallel: bool = False
    embedding_scale: Positive = 1.0
    logit_scale: Positive = 1.0
    logit_softcap: Positive | None = None
    attention_bias: bool = False
    feed_forward_bias: bool = False
    tied: bool = True
    dropout_p: Probability = 0.0
    attention_dropout_p: Probability = 0.0
    end_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        heads = self.num_heads
        if self.head_dim == self.embed_dim / heads:  # the same model, written in two ways
            object.__setattr__(self, "head_dim", None)
        if heads % self.kv_heads:
            raise value_error("num_kv_heads", f"divide num_heads {heads}", self.num_kv_heads)
        if self.position_encoding != "rotary" and self.rotary_scaling is not None:
            got = f"{self.rotary_scaling} with {self.position_encoding} positions"
            raise value_error("rotary_scaling", "be None unless positions are rotary", got)
        if self.position_encoding == "rotary" and self.width_of_head % 2:
            rule = "be even for rotary positions"
            raise value_error("embed_dim / num_heads", rule, f"{self.embed_dim} / {heads}")
        if self.layers == ():
            raise value_error("layers", "contain at least one LayerPattern, or be None", self.layers)
        if self.layers is not None and (self.mask, self.rotary_scaling, self.position_encoding) != (
            None,
            None,
            "rotary",
        ):
            hint = "each LayerPattern has its own mask and rotary_scaling"
            rule = "be None if mask or rotary_scaling is set, or if positions are not rotary"
            raise value_error("layers", rule, shown(self.layers), hint=hint)
        if self.kv_layers is not None:
            self._check_kv_layers(self.kv_layers)
        if self.num_experts is None and (self.num_chosen_experts, self.expert_dim) != (1, None):
            raise value_error("num_experts", "be an int if num_chosen_experts or expert_dim is set", None)
        if self.num_experts is not None and (self.feed_forward_bias or not self.gated):
            rule = "be None unless gated is True and feed_forward_bias is False"
            raise value_error("num_experts", rule, self.num_experts)
        if self.num_experts is not None and self.num_chosen_experts > self.num_experts:
            raise value_error(
                "num_chosen_experts", f"be at most num_experts {self.num_experts}", self.num_chosen_experts
            )
        if self.parallel and (self.part_norm or not self.norm_first):
            raise value_error("parallel", "be False unless norm_first is True and part_norm is False", True)

    def _check_kv_layers(self, kv_layers: tuple[int, ...]) -> None:
        """Raise an error unless each layer has its own keys and values, or reads those of an earlier layer that has."""
        rule = f"be {self.num_layers} indices, each of its own layer or of an earlier one that reads its own"
        is_right = isinstance(kv_layers, tuple) and len(kv_layers) == self.num_layers and are_integers(kv_layers)
        if not is_right or not all(
            0 <= source <= index and kv_layers[source] == source for index, source in enumerate(kv_layers)
        ):
            raise value_error("kv_layers", rule, shown(kv_layers), hint="(0, 1, 0, 1) in four layers: two store keys")
        if self.short_convolution is not None:
            raise value_error("kv_layers", "be None with a short_convolution", kv_layers)
        if self.value_residual:
            raise value_error("kv_layers", "be None with a value_residual", kv_layers)

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads: ``num_kv_heads``, or ``num_heads`` if that is None."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def width_of_head(self) -> int:
        """Width of a head: ``head_dim``, or ``embed_dim / num_heads`` if that is None."""
        return self.embed_dim // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def causal_mask(self) -> Mask:
        """The decoder's ``mask`` combined with a causal mask, so that no token attends to later tokens."""
        return _causal(self.mask)

    @property
    def layer_patterns(self) -> tuple[LayerPattern, ...]:
        """The `LayerPattern` of every layer. All masks are causal."""
        patterns = self.own_patterns
        each = [patterns[index % len(patterns)] for index in range(self.num_layers)]
        return tuple(dataclasses.replace(pattern, mask=_causal(pattern.mask)) for pattern in each)

    @property
    def own_patterns(self) -> tuple[LayerPattern, ...]:
        """The patterns in the config: ``layers``, or a single pattern that all layers share."""
        if self.layers is not None:
            return self.layers
        is_rotary = self.position_encoding == "rotary"
        return (LayerPattern(self.mask, is_rotary, self.rotary_base, self.rotary_scaling),)


def _causal(mask: Mask | None) -> Mask:
    """Combine a decoder's mask with a causal mask, unless it already contains one."""
    if mask is None:
        return Causal()
    parts = mask.parts if isinstance(mask, And) else (mask,)
    return mask if Causal() in parts else Causal() & mask
