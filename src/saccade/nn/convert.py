"""Conversion to and from torch.nn, with equal outputs."""

from __future__ import annotations

from typing import Literal, get_args, overload

from torch import nn

from saccade.nn.attention import MultiHeadAttention
from saccade.nn.convert_attention import attention_from_torch, attention_to_torch
from saccade.nn.convert_transformer import (
    TorchLayer,
    TorchStack,
    layer_from_torch,
    layer_to_torch,
    stack_from_torch,
    stack_to_torch,
)
from saccade.nn.decoder_layer import DecoderLayer
from saccade.nn.encoder_layer import EncoderLayer
from saccade.nn.stack import DecoderStack, EncoderStack
from saccade.support.errors import unsupported, value_error
from saccade.support.validation import check_type

__all__ = ["from_torch", "to_torch"]

_THEIRS = (nn.MultiheadAttention, *get_args(TorchLayer), *get_args(TorchStack))
_OURS = (MultiHeadAttention, EncoderLayer, DecoderLayer, EncoderStack, DecoderStack)


@overload
def from_torch(module: nn.MultiheadAttention, *, batch_first: Literal[True] | None = None) -> MultiHeadAttention: ...
@overload
def from_torch(module: nn.TransformerEncoderLayer, *, batch_first: Literal[True] | None = None) -> EncoderLayer: ...
@overload
def from_torch(module: nn.TransformerDecoderLayer, *, batch_first: Literal[True] | None = None) -> DecoderLayer: ...
@overload
def from_torch(module: nn.TransformerEncoder, *, batch_first: Literal[True] | None = None) -> EncoderStack: ...
@overload
def from_torch(module: nn.TransformerDecoder, *, batch_first: Literal[True] | None = None) -> DecoderStack: ...
def from_torch(module: nn.Module, *, batch_first: Literal[True] | None = None) -> nn.Module:
    """One of our layers, with copies of the weights of torch's and equal outputs.

    =========================== ====================
    ``nn.MultiheadAttention``   `MultiHeadAttention`
    ``TransformerEncoderLayer`` `EncoderLayer`
    ``TransformerDecoderLayer`` `DecoderLayer`
    ``TransformerEncoder``      `EncoderStack`
    ``TransformerDecoder``      `DecoderStack`
    =========================== ====================

    Ours always take ``[batch, len, embed_dim]``. Masks are inverted: where torch's modules want True = ignore, ours
    want True = may attend (`saccade.masks.from_key_padding_mask` converts), and where torch's want ``tgt_mask`` and
    ``is_causal``, ours want ``mask=masks.Causal()``.

    Args:
        module: one of torch's.
        batch_first: True says that ours will be called with the batch first although torch's module was not (torch's
            own default). Otherwise such a module is refused: its inputs look alike but mean something else, and ours
            would attend from one batch item to another.

    Raises:
        TypeError: none of these.
        ValueError: ``batch_first=False``.
        UnsupportedError: it cannot be computed as it stands; every reason is listed. A module that takes the length
            first, where ``batch_first=True`` is not said, or in some of its parts only; a subclass, or a part of one,
            with a ``forward`` of its own. An attention that uses
            ``add_bias_kv``, ``add_zero_attn``, or different widths of key and value; a layer with an activation that
            `FeedForward` does not have, or with parts whose outputs are dropped differently.

    Example:
        >>> from_torch(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)).norm_first
        False
    """
    rule = "be an nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerDecoder or a layer of these"
    check_type("module", module, _THEIRS, rule)
    _check_layout(module, batch_first)
    _check_forward(module, _THEIRS)
    if isinstance(module, nn.MultiheadAttention):
        return attention_from_torch(module)
    if isinstance(module, TorchStack):
        return stack_from_torch(module)
    return layer_from_torch(module)  # type: ignore[arg-type]  # nothing else is left


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

    The table of `from_torch`, read from right to left. Key and value heads that several query heads share are copied
    for each of them.

    Raises:
        TypeError: none of ours.
        UnsupportedError: torch's module lacks what ours does; every reason is listed: a mask that the module owns,
            rotary, a mechanism other than plain softmax, a gate, root-mean-square norms, biases in some parts only, a
            subclass with a ``forward`` of its own.
    """
    rule = "be a saccade.nn.MultiHeadAttention, EncoderStack, DecoderStack or a layer of these"
    check_type("module", module, _OURS, rule)
    _check_forward(module, _OURS)
    if isinstance(module, MultiHeadAttention):
        return attention_to_torch(module)
    if isinstance(module, EncoderStack | DecoderStack):
        return stack_to_torch(module)
    return layer_to_torch(module)  # type: ignore[arg-type]  # nothing else is left


def _check_layout(module: nn.Module, batch_first: object) -> None:
    """Refuse a module that takes the length first, unless the caller knows that ours does not."""
    what = type(module).__name__
    if batch_first is not None and batch_first is not True:
        hint = "ours takes [batch, len, embed_dim] only; x.transpose(0, 1) turns the one into the other"
        raise value_error("batch_first", "be True, or None for what the module says", batch_first, hint=hint)
    layouts = {part.batch_first for part in module.modules() if isinstance(part, nn.MultiheadAttention)}
    if len(layouts) > 1:
        raise unsupported(what, ["batch_first is True in some of its attentions and False in others"])
    if layouts == {False} and batch_first is None:
        reason = "its batch_first is False: it takes [len, batch, embed_dim], and ours [batch, len, embed_dim]"
        hint = "from_torch(module, batch_first=True) converts it, and x.transpose(0, 1) what it is called with"
        raise unsupported(what, [reason], hint=hint)


def _check_forward(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> None:
    """Refuse subclasses with a ``forward`` of their own: copied weights would not say what they compute."""
    reasons = [
        f"{f'{name} is' if name else 'it is'} {type(part).__name__}, whose forward is not that of {kind.__name__}"
        for name, part in module.named_modules()
        for kind in kinds
        if isinstance(part, kind) and type(part).forward is not kind.forward
    ]
    if reasons:
        raise unsupported(type(module).__name__, reasons)
