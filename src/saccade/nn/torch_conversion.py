"""Convert attention layers to and from torch.nn, with equal outputs."""

from __future__ import annotations

import copy
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.mechanisms import Softmax
from saccade.nn.attention import MultiHeadAttention
from saccade.nn.base_layer import AttentionLayer
from saccade.nn.decoder_layer import DecoderLayer
from saccade.nn.encoder_layer import EncoderLayer
from saccade.nn.feed_forward import ACTIVATIONS, Activation, FeedForward
from saccade.nn.projections import reasons_against_plain
from saccade.nn.stack import DecoderStack, EncoderStack
from saccade.support.errors import unsupported, value_error
from saccade.support.validation import check_type

TorchLayer = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
TorchStack = nn.TransformerEncoder | nn.TransformerDecoder
# Our names for attention modules and norms, mapped to torch's names.
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
_TORCH_MODULES = (nn.MultiheadAttention, *get_args(TorchLayer), *get_args(TorchStack))
_SACCADE_MODULES = (MultiHeadAttention, EncoderLayer, DecoderLayer, EncoderStack, DecoderStack)
_SOFTMAX_OPTIONS = ("score", "bias", "scale", "softcap", "sink_logit")  # options that torch's module lacks


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
    """Convert a torch.nn module to our equivalent module, with copied weights and equal outputs.

    =========================== ====================
    ``nn.MultiheadAttention``   `MultiHeadAttention`
    ``TransformerEncoderLayer`` `EncoderLayer`
    ``TransformerDecoderLayer`` `DecoderLayer`
    ``TransformerEncoder``      `EncoderStack`
    ``TransformerDecoder``      `DecoderStack`
    =========================== ====================

    Our modules always take ``[batch, len, embed_dim]``. Masks are inverted: True means "ignore" in torch's modules and
    "may attend" in ours (`saccade.masks.from_key_padding_mask` converts them). ``mask=masks.Causal()`` replaces
    ``tgt_mask`` and ``is_causal``.

    Args:
        module: one of the torch modules above.
        batch_first: pass True to confirm that our module will receive the batch first although torch's module has
            ``batch_first=False``, its default. Otherwise, such a module is rejected, because our module would attend
            across batch items if inputs had torch's layout.

    Raises:
        TypeError: this type of module is not supported.
        ValueError: ``batch_first`` is False.
        UnsupportedError: our module would compute something different. Every reason is listed. The possible
            reasons are: the module, or some of its parts, takes the length first (without ``batch_first=True``); a
            subclass or part overrides ``forward``; an attention module has ``add_bias_kv``, ``add_zero_attn`` or
            different widths of key and value; a layer has an activation that `FeedForward` lacks, or different dropout
            probabilities.

    Example:
        >>> from_torch(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)).norm_first
        False
    """
    rule = "be an nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerDecoder or a layer of these"
    check_type("module", module, _TORCH_MODULES, rule)
    _check_layout(module, batch_first)
    _check_forward(module, _TORCH_MODULES)
    if isinstance(module, nn.MultiheadAttention):
        return _attention_from_torch(module)
    if isinstance(module, TorchStack):
        return _stack_from_torch(module)
    return _layer_from_torch(module)  # type: ignore[arg-type]  # a layer


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
    """Convert one of our modules to torch's module (``batch_first=True``), with copied weights and equal outputs.

    See the table in `from_torch`. A key and value head that several query heads share is copied for each of them.

    Raises:
        TypeError: this type of module is not supported.
        UnsupportedError: torch's module lacks a feature of ours. Every reason is listed. The possible reasons are a
            mask in the module, rotary positions, norms of queries and keys, a ``head_dim`` other than ``embed_dim /
            num_heads``, a mechanism other than plain softmax, a gate, norms other than ``nn.LayerNorm`` or after the
            parts, parallel parts, a decoder layer without cross-attention, biases in only some parts, and a subclass
            that overrides ``forward``.
    """
    rule = "be a saccade.nn.MultiHeadAttention, EncoderStack, DecoderStack or a layer of these"
    check_type("module", module, _SACCADE_MODULES, rule)
    _check_forward(module, _SACCADE_MODULES)
    if isinstance(module, MultiHeadAttention):
        return _attention_to_torch(module)
    if isinstance(module, EncoderStack | DecoderStack):
        return _stack_to_torch(module)
    return _layer_to_torch(module)  # type: ignore[arg-type]  # a layer


def _check_layout(module: nn.Module, batch_first: object) -> None:
    """Raise an error if a torch module takes the length before the batch, unless ``batch_first=True`` was passed."""
    what = type(module).__name__
    if batch_first is not None and batch_first is not True:
        hint = "saccade takes [batch, len, embed_dim] only; x.transpose(0, 1) swaps the two axes"
        raise value_error("batch_first", "be True, or None for the module's own setting", batch_first, hint=hint)
    layouts = {part.batch_first for part in module.modules() if isinstance(part, nn.MultiheadAttention)}
    if len(layouts) > 1:
        raise unsupported(what, ["batch_first is True in some of its attentions and False in others"])
    if layouts == {False} and batch_first is None:
        reason = "its batch_first is False: it takes [len, batch, embed_dim], and saccade takes [batch, len, embed_dim]"
        hint = "from_torch(module, batch_first=True) converts it, and x.transpose(0, 1) converts its inputs"
        raise unsupported(what, [reason], hint=hint)


def _check_forward(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> None:
    """Raise an error if a module to convert, or a part of it, overrides ``forward``.

    The converted module would then compute a different output with the same weights.
    """
    reasons = [
        f"{f'{name} is' if name else 'it is'} {type(part).__name__}, whose forward is not that of {kind.__name__}"
        for name, part in module.named_modules()
        for kind in kinds
        if isinstance(part, kind) and type(part).forward is not kind.forward
    ]
    if reasons:
        raise unsupported(type(module).__name__, reasons)


def _attention_from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
    reasons = []
    if module.bias_k is not None or module.bias_v is not None:
        reasons.append("add_bias_kv appends a learned key, which no mask can describe")
    if module.add_zero_attn:
        reasons.append("add_zero_attn appends a key of zeros, which no mask can describe")
    if module.kdim != module.vdim:
        reasons.append(f"kdim {module.kdim} and vdim {module.vdim} differ; context_dim is one width for both")
    reasons += reasons_against_plain({"out_proj": module.out_proj}, "saccade's module")
    if reasons:
        raise unsupported("MultiHeadAttention", reasons)
    ours = MultiHeadAttention(
        module.embed_dim,
        module.num_heads,
        context_dim=module.kdim,
        dropout_p=module.dropout,
        projection_bias=module.in_proj_bias is not None,
    )
    ours.to(module.out_proj.weight.device, module.out_proj.weight.dtype)
    with torch.no_grad():
        for projection, (weight, bias) in zip(_projections(ours), _weights(module), strict=True):
            projection.weight.copy_(weight)
            if bias is not None:
                projection.bias.copy_(bias)
    return ours.train(module.training)


def _reasons_against_torch(module: AttentionLayer) -> list[str]:
    """Return the reasons why torch has no equivalent of our attention layer; an empty list if it has one."""
    if not isinstance(module, MultiHeadAttention):
        return [f"it is a {type(module).__name__}; torch has multi-head attention only"]
    reasons = []
    if module.mask is not None:
        reasons.append(f"it owns the mask {module.mask}; torch's module takes masks with each call only")
    if module.rotary is not None:
        reasons.append("it rotates queries and keys by their positions; torch's module does not")
    if module.qk_norm is not None:
        reasons.append("it has a norm of queries and keys; torch's module has none")
    if module.head_dim * module.num_heads != module.embed_dim:
        reasons.append(f"its heads are {module.head_dim} wide; torch's are embed_dim / num_heads")
    if module.temperature is not None:
        reasons.append("it scales queries by their positions; torch's module does not")
    if module.convolution is not None:
        reasons.append("it has a short_convolution; torch's module has none")
    if module.gate_projection is not None:
        reasons.append("it has an output_gate; torch's module has none")
    mechanism = module.mechanism
    if type(mechanism) is not Softmax:
        reasons.append(f"its mechanism is {type(mechanism).__name__}; torch's module has plain softmax only")
    else:
        options = [name for name in _SOFTMAX_OPTIONS if getattr(mechanism, name) is not None]
        if options:
            reasons.append(
                f"its mechanism is {mechanism}, with {', '.join(options)}; torch's module has plain softmax only"
            )
    projections = {name: part for name, part in module.named_children() if name.endswith("_projection")}
    return reasons + reasons_against_plain(projections, "torch's module")


def _attention_to_torch(module: MultiHeadAttention) -> nn.MultiheadAttention:
    reasons = _reasons_against_torch(module)
    if reasons:
        raise unsupported("nn.MultiheadAttention", reasons)
    like = module.output_projection.weight
    theirs = nn.MultiheadAttention(
        module.embed_dim,
        module.num_heads,
        dropout=module.dropout_p,
        bias=module.output_projection.bias is not None,
        kdim=module.context_dim,
        vdim=module.context_dim,
        batch_first=True,
        device=like.device,
        dtype=like.dtype,
    )
    share = module.num_heads // module.num_kv_heads

    def expanded(parameter: Tensor) -> Tensor:
        """Repeat each key or value head's rows in a parameter, once for each query head that shares the head."""
        return parameter.unflatten(0, (-1, module.head_dim)).repeat_interleave(share, 0).flatten(0, 1)

    with torch.no_grad():
        for projection, (weight, bias) in zip(_projections(module), _weights(theirs), strict=True):
            is_shared = projection in (module.key_projection, module.value_projection)
            weight.copy_(expanded(projection.weight) if is_shared else projection.weight)
            if bias is not None:
                bias.copy_(expanded(projection.bias) if is_shared else projection.bias)
    return theirs.train(module.training)


def _projections(module: MultiHeadAttention) -> list[nn.Linear]:
    return [module.query_projection, module.key_projection, module.value_projection, module.output_projection]


def _weights(module: nn.MultiheadAttention) -> list[tuple[Tensor, Tensor | None]]:
    """Return views of the weights and biases of torch's attention module, for query, key, value and output."""
    apart = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    weights = apart if module.in_proj_weight is None else module.in_proj_weight.chunk(3)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    return [*zip(weights, biases, strict=True), (module.out_proj.weight, module.out_proj.bias)]


def _layer_from_torch(module: TorchLayer) -> EncoderLayer | DecoderLayer:
    is_encoder = isinstance(module, nn.TransformerEncoderLayer)
    kind: Any = EncoderLayer if is_encoder else DecoderLayer
    names, norms = _ENCODER if is_encoder else _DECODER
    attentions = {ours: _attention_from_torch(getattr(module, theirs)) for ours, theirs in names.items()}
    activation = _activation_of(module.activation)
    # dropout1 to dropout3, which are applied to the outputs of the parts
    dropouts = {getattr(module, name.replace("norm", "dropout")).p for name in norms.values()}
    reasons = []
    if activation is None:
        known = "relu, gelu, silu, nn.GELU(approximate='tanh')"
        reasons.append(f"its activation {module.activation} is none of {known}")
    if len(dropouts) > 1:
        reasons.append(f"its sublayer outputs have different dropout probabilities: {sorted(dropouts)}")
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
    for name, theirs in norms.items():
        setattr(ours, name, copy.deepcopy(getattr(module, theirs)))
    ours.to(module.linear1.weight.device, module.linear1.weight.dtype)
    feed_forward.expand.load_state_dict(module.linear1.state_dict())
    feed_forward.contract.load_state_dict(module.linear2.state_dict())
    return ours.train(module.training)


def _layer_to_torch(module: EncoderLayer | DecoderLayer) -> TorchLayer:
    reasons = _reasons_of_layer(module)
    if reasons:
        raise unsupported(f"nn.Transformer{type(module).__name__}", reasons)
    feed_forward = module.feed_forward
    assert isinstance(feed_forward, FeedForward)  # otherwise a reason was reported
    is_encoder = isinstance(module, EncoderLayer)
    kind = nn.TransformerEncoderLayer if is_encoder else nn.TransformerDecoderLayer
    # Use torch's own functions if they exist, because its layers have a fast path for them.
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
    for ours, name in attentions.items():
        setattr(theirs, name, _attention_to_torch(getattr(module, ours)))
    for ours, name in norms.items():
        setattr(theirs, name, copy.deepcopy(getattr(module, ours)))
    theirs.linear1.load_state_dict(feed_forward.expand.state_dict())
    theirs.linear2.load_state_dict(feed_forward.contract.state_dict())
    return theirs.train(module.training)


def _stack_from_torch(module: TorchStack) -> EncoderStack | DecoderStack:
    layers: list[Any] = [_layer_from_torch(layer) for layer in module.layers]
    kind: Any = EncoderStack if isinstance(module, nn.TransformerEncoder) else DecoderStack
    return kind(layers, final_norm=None if module.norm is None else copy.deepcopy(module.norm)).train(module.training)


def _stack_to_torch(module: EncoderStack | DecoderStack) -> TorchStack:
    reasons: list[str] = []
    for index, layer in enumerate(module.layers):
        reasons += [f"layer {index}: {reason}" for reason in _reasons_of_layer(layer)]  # type: ignore[arg-type]
    if reasons:
        raise unsupported(f"nn.Transformer{type(module).__name__.removesuffix('Stack')}", reasons)
    layers: list[Any] = [_layer_to_torch(layer) for layer in module.layers]  # type: ignore[arg-type]
    norm = None if module.final_norm is None else copy.deepcopy(module.final_norm)
    theirs: TorchStack
    if isinstance(module, EncoderStack):
        # With nested tensors, torch would shorten a padded output to its longest item.
        theirs = nn.TransformerEncoder(layers[0], 1, norm, enable_nested_tensor=False)
    else:
        theirs = nn.TransformerDecoder(layers[0], 1, norm)
    theirs.layers, theirs.num_layers = nn.ModuleList(layers), len(layers)
    return theirs.train(module.training)


def _reasons_of_layer(module: EncoderLayer | DecoderLayer) -> list[str]:
    """Return the reasons why torch has no equivalent of our encoder or decoder layer; an empty list if it has one."""
    attentions, norms = _ENCODER if isinstance(module, EncoderLayer) or module.cross_attention is None else _DECODER
    reasons = []
    if isinstance(module, DecoderLayer) and (module.part_norm or module.parallel):
        reasons.append("its sublayers have norms after them or run in parallel, unlike those of torch's layer")
    if isinstance(module, DecoderLayer) and module.cross_attention is None:
        reasons.append("it has no cross-attention; torch's decoder layer always has (its encoder layer never)")
    for name in attentions:
        reasons += [f"{name}: {reason}" for reason in _reasons_against_torch(getattr(module, name))]
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
    """Return our name for a torch layer's activation, or None if we do not support it."""
    if isinstance(activation, nn.GELU) and activation.approximate == "tanh":
        return "gelu_tanh"
    kinds = (name for kind, name in _MODULES.items() if isinstance(activation, kind))
    return next(kinds, _FUNCTIONS.get(activation))
