"""One attention to and from torch.nn.MultiheadAttention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.mechanisms import Softmax
from saccade.nn.attention import MultiHeadAttention
from saccade.nn.base_layer import AttentionLayer
from saccade.nn.projections import reasons_against_plain
from saccade.support.errors import unsupported

__all__ = ["attention_from_torch", "attention_to_torch", "reasons_against_torch"]

_SOFTMAX = ("score", "bias", "scale", "softcap", "sink_logit")  # what it can be told, and torch's cannot


def attention_from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """See `saccade.nn.from_torch`."""
    reasons = []
    if module.bias_k is not None or module.bias_v is not None:
        reasons.append("add_bias_kv appends a learned key, which no mask can name")
    if module.add_zero_attn:
        reasons.append("add_zero_attn appends a key of zeros, which no mask can name")
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
        for own, (weight, bias) in zip(_projections(ours), _weights(module), strict=True):
            own.weight.copy_(weight)
            if bias is not None:
                own.bias.copy_(bias)
    return ours.train(module.training)


def reasons_against_torch(module: AttentionLayer) -> list[str]:
    """Why torch's module cannot compute what ours does; empty if it can."""
    if not isinstance(module, MultiHeadAttention):
        return [f"it is a {type(module).__name__}; torch has multi-head attention only"]
    reasons = []
    if module.mask is not None:
        reasons.append(f"it owns the mask {module.mask}; torch's module takes masks with each call only")
    if module.rotary is not None:
        reasons.append("it turns queries and keys by their positions; torch's module does not")
    if module.gate_projection is not None:
        reasons.append("it has an output_gate; torch's module has none")
    mechanism = module.mechanism
    if type(mechanism) is not Softmax:
        reasons.append(f"its mechanism is {type(mechanism).__name__}; torch's module has plain softmax only")
    else:
        told = [name for name in _SOFTMAX if getattr(mechanism, name) is not None]
        if told:
            reasons.append(
                f"its mechanism is {mechanism}, with {', '.join(told)}; torch's module has plain softmax only"
            )
    projections = {name: part for name, part in module.named_children() if name.endswith("_projection")}
    return reasons + reasons_against_plain(projections, "torch's module")


def attention_to_torch(module: MultiHeadAttention) -> nn.MultiheadAttention:
    """See `saccade.nn.to_torch`."""
    reasons = reasons_against_torch(module)
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

    def written_out(parameter: Tensor) -> Tensor:
        """The rows of each head as often as query heads share them."""
        return parameter.unflatten(0, (-1, module.head_dim)).repeat_interleave(share, 0).flatten(0, 1)

    with torch.no_grad():
        for own, (weight, bias) in zip(_projections(module), _weights(theirs), strict=True):
            is_shared = own in (module.key_projection, module.value_projection)
            weight.copy_(written_out(own.weight) if is_shared else own.weight)
            if bias is not None:
                bias.copy_(written_out(own.bias) if is_shared else own.bias)
    return theirs.train(module.training)


def _projections(module: MultiHeadAttention) -> list[nn.Linear]:
    return [module.query_projection, module.key_projection, module.value_projection, module.output_projection]


def _weights(module: nn.MultiheadAttention) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of torch's projections (query, key, value, output), which may be written to."""
    apart = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    weights = apart if module.in_proj_weight is None else module.in_proj_weight.chunk(3)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    return [*zip(weights, biases, strict=True), (module.out_proj.weight, module.out_proj.bias)]
