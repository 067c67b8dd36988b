"""Attention in programs exported to ONNX, by ONNX's Attention operator or by the definition in plain operations.

An exported model does not contain the library's code. It cannot plan at run time, and the mask becomes a tensor, so
it takes the memory and time of dense attention. `saccade.engine.custom_op` calls `attend` while ``torch.onnx.export``
traces the program.
"""

from __future__ import annotations

import math
import sys
from functools import reduce

import torch
from torch import Tensor

from saccade.engine.bias.term import DenseTerm
from saccade.engine.inputs import AttentionInputs
from saccade.engine.kernels.kernel import Request
from saccade.engine.positions.positioned_mask import PositionedMask
from saccade.masks import And, Causal, Full, Mask, Not, Or
from saccade.masks.convert.deferred_masks import Pairs, Unread
from saccade.support.errors import unsupported

CALLED_AS = "attention"  # in errors
_ATTENTION_OPSET = 23  # the first with an Attention operator


def is_exporting() -> bool:
    """Return whether ``torch.onnx.export`` is tracing the program."""
    flags = sys.modules.get("torch.onnx._internal.exporter._flags")
    return bool(getattr(flags, "_is_onnx_exporting", False))


def _target_opset() -> int:
    """Return the opset that ``torch.onnx.export`` targets. It is read from local variables, as no API provides it."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        opset = frame.f_locals.get("opset_version")
        if frame.f_globals.get("__name__", "").startswith("torch.onnx.") and isinstance(opset, int):
            return opset
    return _ATTENTION_OPSET


def attend(inputs: AttentionInputs, value: Tensor, request: Request) -> tuple[Tensor, Tensor | None]:
    """Compute the output and the lse of attention in operations that ONNX supports; the lse is None unless needed.

    Raises:
        UnsupportedError: there is dropout, or a user's function changes the scores.
    """
    reasons = ["dropout is for training, and ONNX models are for inference"] if request.dropout_p else []
    if inputs.modification is not None:
        reasons.append("its scores are changed by a function, which is called tile by tile")
    if reasons:
        raise unsupported("torch.onnx.export", reasons, hint="model.eval()")
    allowed, is_causal = _allowed(inputs)
    needs_lse = request.needs_lse or inputs.sink_logit is not None
    is_standard = inputs.tile_function is None and (inputs.bias is None or isinstance(inputs.bias, DenseTerm))
    # ONNX adds the mask before it caps the scores, so masked pairs would get positive weights.
    if is_standard and inputs.softcap is None and not needs_lse and _target_opset() >= _ATTENTION_OPSET:
        return _by_attention(inputs, value, allowed, is_causal), None
    return _by_definition(inputs, value, allowed)


def _allowed(inputs: AttentionInputs) -> tuple[Tensor | None, bool]:
    """Return the pairs that the mask allows, and whether ONNX's causal flag would allow exactly these pairs.

    The pairs are bool ``[batch | 1, heads | 1, q_len, kv_len]``, or None for all pairs. ONNX's flag aligns the first
    query with the first key.
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # noqa: PLC0415  imports the compiler

    rule, shape = inputs.rule, inputs.shape
    if isinstance(rule, Full):
        return None, False
    allowed = pairs_of(rule, _pairs(inputs), shape, inputs.origin)
    while allowed.dim() < 4:
        allowed = allowed[None]
    allowed = allowed.expand(allowed.shape[0], allowed.shape[1], shape[2], shape[3])
    return allowed, isinstance(rule, Causal) and statically_known_true(inputs.origin[0] == inputs.origin[1])


def _pairs(inputs: AttentionInputs) -> Pairs:
    batch, heads, q_len, kv_len = (torch.arange(size, device=inputs.device) for size in inputs.shape)
    return Pairs(batch[:, None, None, None], heads[:, None, None], q_len[:, None], kv_len)


def pairs_of(rule: Mask, pairs: Pairs, shape: tuple[int, int, int, int], origin: tuple[int, int]) -> Tensor:
    """Return which of the query-key pairs a mask allows, computed by operations that a traced program can contain."""
    if isinstance(rule, And | Or):
        parts = [pairs_of(part, pairs, shape, origin) for part in rule.parts]
        return reduce(torch.logical_and if isinstance(rule, And) else torch.logical_or, parts)
    if isinstance(rule, Not):
        return ~pairs_of(rule.part, pairs, shape, origin)
    if isinstance(rule, Unread):
        return rule.at_indices(pairs, shape)
    b, h, q, kv = pairs
    if isinstance(rule, PositionedMask):
        return rule.allows(b, h, q, kv)
    return rule.allows(b, h, q + origin[0], kv + origin[1])


def _by_attention(inputs: AttentionInputs, value: Tensor, allowed: Tensor | None, is_causal: bool) -> Tensor:
    """Return the attention output computed by ONNX's Attention operator."""
    query, mask = inputs.query, None if is_causal else allowed
    if inputs.bias is not None:
        bias = inputs.bias.source.to(query.dtype)
        mask = bias if allowed is None else torch.where(allowed, bias, -torch.inf)
        is_causal = False
    out: Tensor = torch.onnx.ops.attention(query, inputs.key, value, mask, is_causal=is_causal, scale=inputs.scale)[0]
    if allowed is None or is_causal:
        return out
    return torch.where(allowed.any(3, keepdim=True), out, 0.0)  # a query without keys gives NaN in ONNX


def _by_definition(inputs: AttentionInputs, value: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the output and the lse of attention, computed by its definition."""
    wide, repeats = inputs.compute_dtype, inputs.shape[1] // inputs.key.shape[1]
    q = inputs.query.to(wide)
    k, v = (x.to(wide).repeat_interleave(repeats, 1) if repeats > 1 else x.to(wide) for x in (inputs.key, value))
    scores = q @ k.mT if inputs.tile_function is None else inputs.tile_function(q, k, *inputs.parameters)
    scores = scores * inputs.scale
    if inputs.softcap is not None:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    if inputs.bias is not None:
        bias = inputs.bias.source if isinstance(inputs.bias, DenseTerm) else inputs.bias.at(*_pairs(inputs))
        scores = scores + bias.to(wide)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    highest = scores.amax(3, keepdim=True).detach()
    highest = torch.where(highest == -math.inf, 0.0, highest)
    weights = torch.exp(scores - highest)
    total = weights.sum(3, keepdim=True)
    out = (weights @ v) / torch.where(total == 0, 1.0, total)
    return out.to(value.dtype), (torch.log(total) + highest)[..., 0]
