"""Conversion to and from torch.nn.MultiheadAttention, with equal outputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.errors import type_error, unsupported
from saccade.mechanisms import Softmax
from saccade.nn.attention import MultiHeadAttention

__all__ = ["from_torch", "to_torch"]


def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """A `MultiHeadAttention` with the weights of torch's module and equal outputs.

    Ours always takes ``[batch, len, embed_dim]``, whatever ``batch_first`` was. Masks are inverted: where torch's
    module wants True = ignore, ours wants True = may attend (`saccade.masks.from_key_padding_mask` converts).

    Raises:
        TypeError: not an ``nn.MultiheadAttention``.
        UnsupportedError: it uses ``add_bias_kv``, ``add_zero_attn``, or different widths of key and value.
    """
    if not isinstance(module, nn.MultiheadAttention):
        raise type_error("from_torch", "module", "be an nn.MultiheadAttention", type(module).__name__)
    reasons = []
    if module.bias_k is not None or module.bias_v is not None:
        reasons.append("add_bias_kv appends a learned key, which no mask can name")
    if module.add_zero_attn:
        reasons.append("add_zero_attn appends a key of zeros, which no mask can name")
    if module.kdim != module.vdim:
        reasons.append(f"kdim {module.kdim} and vdim {module.vdim} differ; context_dim is one width for both")
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


def to_torch(module: MultiHeadAttention) -> nn.MultiheadAttention:
    """An ``nn.MultiheadAttention(batch_first=True)`` with the weights of ours and equal outputs.

    Key and value heads that several query heads share are written out for each of them.

    Raises:
        TypeError: not a `MultiHeadAttention`.
        UnsupportedError: the module has a mask, or a mechanism that torch's module lacks.
    """
    if not isinstance(module, MultiHeadAttention):
        raise type_error("to_torch", "module", "be a saccade.nn.MultiHeadAttention", type(module).__name__)
    reasons = []
    if module.mask is not None:
        reasons.append(f"it owns the mask {module.mask}; torch's module takes masks with each call only")
    mechanism = module.mechanism
    plain = type(mechanism) is Softmax and mechanism.scale is None and mechanism.softcap is None
    if not plain:
        reasons.append(f"its mechanism is {mechanism}; torch's module has plain softmax only")
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
