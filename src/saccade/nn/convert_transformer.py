"""Layers and stacks to and from torch.nn's transformer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from saccade.nn.convert_attention import attention_from_torch, attention_to_torch, reasons_against_torch
from saccade.nn.decoder_layer import DecoderLayer
from saccade.nn.encoder_layer import EncoderLayer
from saccade.nn.feed_forward import ACTIVATIONS, Activation, FeedForward
from saccade.nn.projections import reasons_against_plain
from saccade.nn.stack import DecoderStack, EncoderStack
from saccade.support.errors import unsupported

__all__ = ["TorchLayer", "TorchStack", "layer_from_torch", "layer_to_torch", "stack_from_torch", "stack_to_torch"]

TorchLayer = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
TorchStack = nn.TransformerEncoder | nn.TransformerDecoder
# Attentions and norms by our names, and torch's.
_ENCODER = {"attention": "self_attn"}, {"attention_norm": "norm1", "feed_forward_norm": "norm2"}
_DECODER = (
    {"attention": "self_attn", "cross_attention": "multihead_attn"},
    {"attention_norm": "norm1", "cross_attention_norm": "norm2", "feed_forward_norm": "norm3"},
)
_FUNCTIONS: dict[Any, Activation] = {
    ACTIVATIONS["gelu_tanh"]: "gelu_tanh",
    ACTIVATIONS["quick_gelu"]: "quick_gelu",
    torch.relu: "relu",
    F.relu: "relu",
    F.gelu: "gelu",
    F.silu: "silu",
}
_MODULES: dict[type[nn.Module], Activation] = {nn.ReLU: "relu", nn.GELU: "gelu", nn.SiLU: "silu"}


def layer_from_torch(module: TorchLayer) -> EncoderLayer | DecoderLayer:
    """See `saccade.nn.from_torch`."""
    is_encoder = isinstance(module, nn.TransformerEncoderLayer)
    kind: Any = EncoderLayer if is_encoder else DecoderLayer
    names, norms = _ENCODER if is_encoder else _DECODER
    attentions = {ours: attention_from_torch(getattr(module, theirs)) for ours, theirs in names.items()}
    activation = _activation_of(module.activation)
    # dropout1 to dropout3, of what each part adds
    dropouts = {getattr(module, name.replace("norm", "dropout")).p for name in norms.values()}
    reasons = []
    if activation is None:
        known = "relu, gelu, silu, nn.GELU(approximate='tanh')"
        reasons.append(f"its activation {module.activation} is none of {known}")
    if len(dropouts) > 1:
        reasons.append(f"what its parts add is dropped with different probabilities: {sorted(dropouts)}")
    reasons += reasons_against_plain({"linear1": module.linear1, "linear2": module.linear2}, "saccade's layer")
    if reasons or activation is None:
        raise unsupported(f"a layer of {type(module).__name__}", reasons)
    feed_forward = FeedForward(
        module.linear1.in_features,
        module.linear1.out_features,
        activation=activation,
        dropout_p=module.dropout.p,
        projection_bias=module.linear1.bias is not None,
    )
    ours = kind(feed_forward=feed_forward, norm_first=module.norm_first, dropout_p=dropouts.pop(), **attentions)
    for own, theirs in norms.items():
        setattr(ours, own, copy.deepcopy(getattr(module, theirs)))
    ours.to(module.linear1.weight.device, module.linear1.weight.dtype)
    feed_forward.expand.load_state_dict(module.linear1.state_dict())
    feed_forward.contract.load_state_dict(module.linear2.state_dict())
    return ours.train(module.training)


def layer_to_torch(module: EncoderLayer | DecoderLayer) -> TorchLayer:
    """See `saccade.nn.to_torch`."""
    reasons = _reasons_of_layer(module)
    if reasons:
        raise unsupported(f"nn.Transformer{type(module).__name__}", reasons)
    feed_forward = module.feed_forward
    assert isinstance(feed_forward, FeedForward)  # reasons were asked
    is_encoder = isinstance(module, EncoderLayer)
    kind = nn.TransformerEncoderLayer if is_encoder else nn.TransformerDecoderLayer
    # torch's own functions where it has them: its layers take a fast path for these.
    functions = {name: function for function, name in _FUNCTIONS.items()}
    theirs = kind(
        feed_forward.embed_dim,
        module.attention.num_heads,
        feed_forward.hidden_dim,
        dropout=module.dropout.p,
        activation=functions[feed_forward.activation],
        batch_first=True,
        norm_first=module.norm_first,
        bias=feed_forward.expand.bias is not None,
        device=feed_forward.expand.weight.device,
        dtype=feed_forward.expand.weight.dtype,
    )
    theirs.dropout.p = feed_forward.dropout.p
    attentions, norms = _ENCODER if is_encoder else _DECODER
    for own, name in attentions.items():
        setattr(theirs, name, attention_to_torch(getattr(module, own)))
    for own, name in norms.items():
        setattr(theirs, name, copy.deepcopy(getattr(module, own)))
    theirs.linear1.load_state_dict(feed_forward.expand.state_dict())
    theirs.linear2.load_state_dict(feed_forward.contract.state_dict())
    return theirs.train(module.training)


def stack_from_torch(module: TorchStack) -> EncoderStack | DecoderStack:
    """See `saccade.nn.from_torch`."""
    layers: list[Any] = [layer_from_torch(layer) for layer in module.layers]
    kind: Any = EncoderStack if isinstance(module, nn.TransformerEncoder) else DecoderStack
    return kind(layers, final_norm=None if module.norm is None else copy.deepcopy(module.norm)).train(module.training)


def stack_to_torch(module: EncoderStack | DecoderStack) -> TorchStack:
    """See `saccade.nn.to_torch`."""
    reasons: list[str] = []
    for index, layer in enumerate(module.layers):
        reasons += [f"layer {index}: {reason}" for reason in _reasons_of_layer(layer)]  # type: ignore[arg-type]
    if reasons:
        raise unsupported(f"nn.Transformer{type(module).__name__.removesuffix('Stack')}", reasons)
    layers: list[Any] = [layer_to_torch(layer) for layer in module.layers]  # type: ignore[arg-type]
    norm = None if module.final_norm is None else copy.deepcopy(module.final_norm)
    theirs: TorchStack
    if isinstance(module, EncoderStack):
        # Nested tensors would shorten a padded output to the longest item.
        theirs = nn.TransformerEncoder(layers[0], 1, norm, enable_nested_tensor=False)
    else:
        theirs = nn.TransformerDecoder(layers[0], 1, norm)
    theirs.layers, theirs.num_layers = nn.ModuleList(layers), len(layers)
    return theirs.train(module.training)


def _reasons_of_layer(module: EncoderLayer | DecoderLayer) -> list[str]:
    """Why torch's layer cannot compute what ours does; empty if it can."""
    attentions, norms = _ENCODER if isinstance(module, EncoderLayer) or module.cross_attention is None else _DECODER
    reasons = []
    if isinstance(module, DecoderLayer) and module.cross_attention is None:
        reasons.append("it has no cross-attention; torch's decoder layer always has (its encoder layer never)")
    for name in attentions:
        reasons += [f"{name}: {reason}" for reason in reasons_against_torch(getattr(module, name))]
    for name in norms:
        if type(getattr(module, name)) is not nn.LayerNorm:
            reasons.append(f"{name} is {type(getattr(module, name)).__name__}; torch's layer has LayerNorm only")
    feed_forward = module.feed_forward
    if not isinstance(feed_forward, FeedForward):
        reasons.append(f"feed_forward is {type(feed_forward).__name__}; torch's layer has two linear layers")
    elif feed_forward.gate is not None:
        reasons.append("feed_forward is gated; torch's layer has no gate")
    else:
        parts = {"feed_forward.expand": feed_forward.expand, "feed_forward.contract": feed_forward.contract}
        reasons += reasons_against_plain(parts, "torch's layer")
    linear = [part for part in module.modules() if isinstance(part, nn.Linear | nn.LayerNorm)]
    if len({part.bias is None for part in linear}) > 1:
        reasons.append("some of its parts have a bias and some have none; torch's layer has one in all or in none")
    return reasons


def _activation_of(activation: Any) -> Activation | None:
    """Our name of a torch layer's activation; None where we have none."""
    if isinstance(activation, nn.GELU) and activation.approximate == "tanh":
        return "gelu_tanh"
    kinds = (name for kind, name in _MODULES.items() if isinstance(activation, kind))
    return next(kinds, _FUNCTIONS.get(activation))
