"""Conversion to and from torch.nn, with equal outputs."""

from __future__ import annotations

from typing import overload

from torch import nn

from saccade.errors import type_error
from saccade.nn.attention import MultiHeadAttention
from saccade.nn.convert_attention import attention_from_torch, attention_to_torch
from saccade.nn.convert_transformer import layer_from_torch, layer_to_torch, stack_from_torch, stack_to_torch
from saccade.nn.decoder_layer import DecoderLayer
from saccade.nn.encoder_layer import EncoderLayer
from saccade.nn.stack import DecoderStack, EncoderStack

__all__ = ["from_torch", "to_torch"]


@overload
def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention: ...
@overload
def from_torch(module: nn.TransformerEncoderLayer) -> EncoderLayer: ...
@overload
def from_torch(module: nn.TransformerDecoderLayer) -> DecoderLayer: ...
@overload
def from_torch(module: nn.TransformerEncoder) -> EncoderStack: ...
@overload
def from_torch(module: nn.TransformerDecoder) -> DecoderStack: ...
def from_torch(module: nn.Module) -> nn.Module:
    """One of our layers, with copies of the weights of torch's and equal outputs.

    ========================== ====================
    ``nn.MultiheadAttention``  `MultiHeadAttention`
    ``TransformerEncoderLayer`` `EncoderLayer`
    ``TransformerDecoderLayer`` `DecoderLayer`
    ``TransformerEncoder``     `EncoderStack`
    ``TransformerDecoder``     `DecoderStack`
    ========================== ====================

    Ours always take ``[batch, len, embed_dim]``, whatever ``batch_first`` was. Masks are inverted: where torch's
    modules want True = ignore, ours want True = may attend (`saccade.masks.from_key_padding_mask` converts), and where
    torch's want ``tgt_mask`` and ``is_causal``, ours want ``mask=masks.Causal()``.

    Raises:
        TypeError: none of these.
        UnsupportedError: it cannot be computed as it stands; every reason is listed. An attention that uses
            ``add_bias_kv``, ``add_zero_attn``, or different widths of key and value; a layer with an activation that
            `FeedForward` has not, or with parts whose outputs are dropped differently.

    Example:
        >>> from_torch(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)).norm_first
        False
    """
    if isinstance(module, nn.MultiheadAttention):
        return attention_from_torch(module)
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return layer_from_torch(module)
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder):
        return stack_from_torch(module)
    rule = "be an nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerDecoder or a layer of these"
    raise type_error("from_torch", "module", rule, type(module).__name__)


@overload
def to_torch(module: MultiHeadAttention) -> nn.MultiheadAttention: ...
@overload
def to_torch(module: EncoderLayer) -> nn.TransformerEncoderLayer: ...
@overload
def to_torch(module: DecoderLayer) -> nn.TransformerDecoderLayer: ...
@overload
def to_torch(module: EncoderStack) -> nn.TransformerEncoder: ...
@overload
def to_torch(module: DecoderStack) -> nn.TransformerDecoder: ...
def to_torch(module: nn.Module) -> nn.Module:
    """One of torch's modules (``batch_first=True``), with copies of the weights of ours and equal outputs.

    The table of `from_torch`, read from right to left. Key and value heads that several query heads share are written
    out for each of them.

    Raises:
        TypeError: none of ours.
        UnsupportedError: torch's module lacks what ours does; every reason is listed: a mask that the module owns,
            rotary, a mechanism other than plain softmax, a gate, root-mean-square norms, biases in some parts only.
    """
    if isinstance(module, MultiHeadAttention):
        return attention_to_torch(module)
    if isinstance(module, EncoderLayer | DecoderLayer):
        return layer_to_torch(module)
    if isinstance(module, EncoderStack | DecoderStack):
        return stack_to_torch(module)
    rule = "be a saccade.nn.MultiHeadAttention, EncoderStack, DecoderStack or a layer of these"
    raise type_error("to_torch", "module", rule, type(module).__name__)
