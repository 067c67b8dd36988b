"""Layers and stacks to and from torch.nn's transformer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from saccade.errors import unsupported
from saccade.nn.attention import MultiHeadAttention
from saccade.nn.convert_attention import attention_from_torch, attention_to_torch, reasons_against_torch
from saccade.nn.decoder_layer import DecoderLayer
from saccade.nn.encoder_layer import EncoderLayer
from saccade.nn.feed_forward import ACTIVATIONS, Activation, FeedForward
from saccade.nn.projections import reasons_against_plain
from saccade.nn.stack import DecoderStack, EncoderStack

__all__ = ["layer_from_torch", "layer_to_torch", "stack_from_torch", "stack_to_torch"]

TorchLayer = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
TorchStack = nn.TransformerEncoder | nn.TransformerDecoder


def layer_from_torch(module: TorchLayer) -> EncoderLayer | DecoderLayer:
    """See `saccade.nn.from_torch`."""
    attention, *across = (attention_from_torch(part) for part in _attentions_of(module))
    activation = _activation_of(module.activation)
    residual_dropouts = {drop.p for drop in _residual_dropouts_of(module)}
    reasons = []
    if activation is None:
        known = "relu, gelu, silu, nn.GELU(approximate='tanh')"
        reasons.append(f"its activation {module.activation} is none of {known}")
    if len(residual_dropouts) > 1:
        reasons.append(f"what its parts add is dropped with different probabilities: {sorted(residual_dropouts)}")
    reasons += reasons_against_plain({"linear1": module.linear1, "linear2": module.linear2}, "saccade's layer")
    if reasons or activation is None:
        raise unsupported("from_torch", f"a layer of {type(module).__name__}", reasons)
    feed_forward = FeedForward(
        module.linear1.in_features,
        module.linear1.out_features,
        activation=activation,
        dropout_p=module.dropout.p,
        projection_bias=module.linear1.bias is not None,
    )
    options: dict[str, Any] = {"norm_first": module.norm_first, "dropout_p": residual_dropouts.pop()}
    ours: EncoderLayer | DecoderLayer
    if isinstance(module, nn.TransformerEncoderLayer):
        ours = EncoderLayer(attention, feed_forward, **options)
        norms = {"attention_norm": module.norm1, "feed_forward_norm": module.norm2}
    else:
        ours = DecoderLayer(attention, feed_forward, cross_attention=across[0], **options)
        norms = {
            "attention_norm": module.norm1,
            "cross_attention_norm": module.norm2,
            "feed_forward_norm": module.norm3,
        }
    for name, norm in norms.items():
        setattr(ours, name, copy.deepcopy(norm))
    weight = module.linear1.weight
    ours.to(weight.device, weight.dtype)
    feed_forward.expand.load_state_dict(module.linear1.state_dict())
    feed_forward.contract.load_state_dict(module.linear2.state_dict())
    return ours.train(module.training)


def layer_to_torch(module: EncoderLayer | DecoderLayer) -> TorchLayer:
    """See `saccade.nn.to_torch`."""
    reasons = _reasons_of_layer(module)
    if reasons:
        raise unsupported("to_torch", f"nn.Transformer{type(module).__name__}", reasons)
    feed_forward = module.feed_forward
    assert isinstance(feed_forward, FeedForward)  # reasons were asked
    kind = nn.TransformerEncoderLayer if isinstance(module, EncoderLayer) else nn.TransformerDecoderLayer
    # torch's own functions where it has them: its layers take a fast path for these.
    known: dict[str, Any] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu, "gelu_tanh": ACTIVATIONS["gelu_tanh"]}
    theirs = kind(
        feed_forward.embed_dim,
        module.attention.num_heads,
        feed_forward.hidden_dim,
        dropout=module.dropout.p,
        activation=known[feed_forward.activation],
        batch_first=True,
        norm_first=module.norm_first,
        bias=feed_forward.expand.bias is not None,
        device=feed_forward.expand.weight.device,
        dtype=feed_forward.expand.weight.dtype,
    )
    theirs.dropout.p = feed_forward.dropout.p
    theirs.self_attn = attention_to_torch(module.attention)
    norms = [module.attention_norm, module.feed_forward_norm]
    if isinstance(module, DecoderLayer):
        assert module.cross_attention is not None and module.cross_attention_norm is not None  # noqa: PT018  as above
        theirs.multihead_attn = attention_to_torch(module.cross_attention)
        norms.insert(1, module.cross_attention_norm)
    for index, own in enumerate(norms, start=1):
        setattr(theirs, f"norm{index}", copy.deepcopy(own))
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
        raise unsupported("to_torch", f"nn.Transformer{type(module).__name__.removesuffix('Stack')}", reasons)
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
    """Why torch's layer cannot compute what ours does; empty: it can."""
    attentions: dict[str, MultiHeadAttention] = {"attention": module.attention}
    norms = {"attention_norm": module.attention_norm, "feed_forward_norm": module.feed_forward_norm}
    reasons = []
    if isinstance(module, DecoderLayer):
        if module.cross_attention is None or module.cross_attention_norm is None:
            reasons.append("it has no cross-attention; torch's decoder layer always has (its encoder layer never)")
        else:
            attentions["cross_attention"] = module.cross_attention
            norms["cross_attention_norm"] = module.cross_attention_norm
    for name, attention in attentions.items():
        reasons += [f"{name}: {reason}" for reason in reasons_against_torch(attention)]
    for name, norm in norms.items():
        if type(norm) is not nn.LayerNorm:
            reasons.append(f"{name} is {type(norm).__name__}; torch's layer has LayerNorm only")
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


def _attentions_of(module: TorchLayer) -> list[nn.MultiheadAttention]:
    across = [module.multihead_attn] if isinstance(module, nn.TransformerDecoderLayer) else []
    return [module.self_attn, *across]


def _residual_dropouts_of(module: TorchLayer) -> list[nn.Dropout]:
    third = [module.dropout3] if isinstance(module, nn.TransformerDecoderLayer) else []
    return [module.dropout1, module.dropout2, *third]


def _activation_of(activation: object) -> Activation | None:
    """Our name of what a torch layer bends with; None where there is none."""
    if activation is ACTIVATIONS["gelu_tanh"]:
        return "gelu_tanh"
    if isinstance(activation, nn.GELU):
        return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
    names: list[tuple[Activation, tuple[object, ...], type[nn.Module]]] = [
        ("relu", (F.relu, torch.relu), nn.ReLU),
        ("gelu", (F.gelu,), nn.GELU),
        ("silu", (F.silu,), nn.SiLU),
    ]
    for name, functions, kind in names:
        if activation in functions or isinstance(activation, kind):
            return name
    return None
