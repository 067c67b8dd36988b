"""One attention to and from torch.nn.MultiheadAttention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.errors import unsupported
from saccade.mechanisms import Softmax
from saccade.nn.attention import MultiHeadAttention
from saccade.nn.projections import reasons_against_plain

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
        raise unsupported("from_torch", "MultiHeadAttention", reasons)
    ours = MultiHeadAttention(
        module.embed_dim,
        module.num_heads,
        context_dim=module.kdim,
        dropout_p=module.dropout,
        projection_bias=module.in_proj_bias is not None,
    )
    ours.to(module.out_proj.weight.device, module.out_proj.weight.dtype)
    weights = (
        module.in_proj_weight.chunk(3)
        if module.in_proj_weight is not None
        else (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    )
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    projections = (ours.query_projection, ours.key_projection, ours.value_projection)
    with torch.no_grad():
        for projection, weight, bias in zip(projections, weights, biases, strict=True):
            _set(projection, weight, bias)
        _set(ours.output_projection, module.out_proj.weight, module.out_proj.bias)
    return ours.train(module.training)


def reasons_against_torch(module: MultiHeadAttention) -> list[str]:
    """Why torch's module cannot compute what ours does; empty: it can."""
    reasons = []
    if module.mask is not None:
        reasons.append(f"it owns the mask {module.mask}; torch's module takes masks with each call only")
    if module.rotary is not None:
        reasons.append("it turns queries and keys by their positions; torch's module does not")
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
        raise unsupported("to_torch", "nn.MultiheadAttention", reasons)
    weight = module.output_projection.weight
    theirs = nn.MultiheadAttention(
        module.embed_dim,
        module.num_heads,
        dropout=module.dropout_p,
        bias=module.output_projection.bias is not None,
        kdim=module.context_dim,
        vdim=module.context_dim,
        batch_first=True,
        device=weight.device,
        dtype=weight.dtype,
    )
    share = module.num_heads // module.num_kv_heads

    def written_out(parameter: Tensor) -> Tensor:
        heads = parameter.unflatten(0, (module.num_kv_heads, module.head_dim))
        return heads.repeat_interleave(share, 0).flatten(0, 1)

    q, k, v = module.query_projection, module.key_projection, module.value_projection
    weights = (q.weight, written_out(k.weight), written_out(v.weight))
    with torch.no_grad():
        if theirs.in_proj_weight is not None:
            theirs.in_proj_weight.copy_(torch.cat(weights))
        else:
            for own, new in zip(
                (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight), weights, strict=True
            ):
                own.copy_(new)
        if theirs.in_proj_bias is not None:
            theirs.in_proj_bias.copy_(torch.cat([q.bias, written_out(k.bias), written_out(v.bias)]))
        _set(theirs.out_proj, weight, module.output_projection.bias)
    return theirs.train(module.training)


def _set(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    linear.weight.copy_(weight)
    if bias is not None:
        linear.bias.copy_(bias)
