"""Convert calls to ``F.multi_head_attention_forward``, the function that ``nn.MultiheadAttention`` calls."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from saccade.integrations.call_output import CallOutput
from saccade.integrations.lazy_weights import weights_of
from saccade.integrations.mha_inputs import projected, rule_of, with_added_keys
from saccade.integrations.mha_matrix import layer_matrix, layer_output
from saccade.integrations.redirected_call import Attend, Call
from saccade.integrations.tensor_masks import both
from saccade.masks import Full, Mask
from saccade.matrix import AttentionMatrix
from saccade.support.errors import unsupported

CALLED_AS = "record"  # the name in error messages

_FUNCTION = inspect.signature(F.multi_head_attention_forward)
_PROJECTED = "static_k= contains keys that are already projected, possibly for a different head size"


def function_matrix(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AttentionMatrix:
    """Return the attention matrix of a call to ``F.multi_head_attention_forward``.

    Raises:
        UnsupportedError: the call passes already projected keys, or ``is_causal`` without a mask.
    """
    reason = reason_against_function(args, kwargs)
    if reason:
        raise unsupported("F.multi_head_attention_forward", [reason])
    call = _arguments(args, kwargs)
    masks = {"attn_mask": call.attn_mask, "key_padding_mask": call.key_padding_mask}
    return layer_matrix(call, call.query, call.key, call.query.dim() == 2, **masks)


def function_output(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Tensor) -> CallOutput | None:
    """Wrap the output of ``F.multi_head_attention_forward`` as a `CallOutput`; return None if this is unsupported."""
    if reason_against_function(args, kwargs):
        return None
    call = _arguments(args, kwargs)
    dropout_p = float(call.dropout_p) if call.training else 0.0
    return layer_output(call, (call.query, call.key, call.value), out, call.query.dim() == 2, dropout_p)


def reason_against_function(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the reason why a call cannot be converted, or "" if it can."""
    call = _arguments(args, kwargs)
    if call.is_causal and call.attn_mask is None:
        return "is_causal only describes attn_mask, and attn_mask is missing"
    return _PROJECTED if call.static_k is not None or call.static_v is not None else ""


def run_mha_function(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], attend: Attend
) -> tuple[Tensor, Tensor | None] | None:
    """Evaluate a call to ``F.multi_head_attention_forward`` using ``attend``; return None if ``attend`` returns None.

    Args:
        args, kwargs: the arguments of the call.
        attend: computes the attention of the projected inputs.

    Returns:
        The output and the weights, in the layout of the call.
    """
    call = _arguments(args, kwargs)
    is_single = call.query.dim() == 2
    x = [tensor[None] if is_single else tensor.transpose(0, 1) for tensor in (call.query, call.key, call.value)]
    q, k, v = projected(call, *x)
    assert v is not None  # values were passed
    q_len, kv_len = q.shape[2], x[1].shape[1]
    rule, bias = rule_of(call.attn_mask, call.key_padding_mask, (*q.shape[:3], k.shape[2]))

    def make(pattern: Mask | None) -> AttentionMatrix:
        pattern = Full() if pattern is None else with_added_keys(pattern, q_len, kv_len, k.shape[2] - kv_len)
        return AttentionMatrix(q, k, both(pattern, rule), bias=bias)

    dropout_p = float(call.dropout_p) if call.training else 0.0
    redirected = attend(Call(make, v, q_len, dropout_p, returns_weights=call.need_weights))
    if redirected is None:
        return None
    out, matrix = redirected.out, redirected.matrix
    out = F.linear(out.transpose(1, 2).flatten(2), call.out_proj_weight, call.out_proj_bias)
    out = out[0] if is_single else out.transpose(0, 1)
    if not call.need_weights:
        return out, None
    sources = (q, k, *rule.tensors(), *(() if bias is None else (bias,)))
    return out, weights_of(matrix, call.average_attn_weights, out.dtype, sources, is_single=is_single)


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return an object with the arguments of a call as attributes, named as in ``nn.MultiheadAttention``."""
    bound = _FUNCTION.bind(*args, **kwargs)
    bound.apply_defaults()
    call = SimpleNamespace(**bound.arguments)
    if call.use_separate_proj_weight:
        call.in_proj_weight = None
    return call
