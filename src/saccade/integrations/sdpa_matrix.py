"""Convert calls to torch's scaled_dot_product_attention (SDPA) to attention matrices, values and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from saccade.engine.nested import Nested, is_nested
from saccade.integrations.call_output import CallOutput
from saccade.integrations.redirected_call import Attend, Call
from saccade.integrations.tensor_masks import both, rule_of_tensor
from saccade.masks import Causal, Full, Mask
from saccade.masks.convert.as_mask import starts_at_first_key
from saccade.matrix import AttentionMatrix
from saccade.support.errors import unsupported
from saccade.support.validation import is_causal_bias

CALLED_AS = "record"  # the name in error messages

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def sdpa_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call to torch's SDPA by name."""
    return dict(zip(_NAMES, args, strict=False)) | dict(kwargs)


def sdpa_output(arguments: Mapping[str, Any], out: Tensor) -> CallOutput | None:
    """Wrap the output of a call to torch's SDPA as a `CallOutput`; return None for nested tensors."""
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    if is_nested(query, key, value):
        return None
    shape = leading_shape(query, key, value)

    def to_heads(grad: Tensor) -> Tensor:
        return grad.reshape(-1, *grad.shape[-3:]) if grad.dim() > 2 else grad[None, None]

    return CallOutput(out, to_heads, lambda: flatten_leading(value, shape), float(arguments.get("dropout_p") or 0.0))


def leading_shape(*tensors: Tensor) -> torch.Size:
    """Return the broadcast shape of the leading dimensions of a call (all before heads, length and width)."""
    return torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))


def sdpa_matrix(arguments: Mapping[str, Any], pattern: Mask | None = None) -> AttentionMatrix:
    """Return the matrix of a call to torch's SDPA, with leading dimensions flattened into the batch.

    Args:
        arguments: the arguments of the call by name.
        pattern: combined with the call's mask by ``&``; ignored for nested tensors.
    """
    query, key = arguments["query"], arguments["key"]
    if is_nested(query, key):
        return _nested_matrix(query, key, arguments)
    shape = leading_shape(query, key, arguments["value"])
    heads = query.shape[-3] if query.dim() > 2 else 1
    query, key = (flatten_leading(x, shape) for x in (query, key))
    q_len, kv_len = query.shape[2], key.shape[2]
    pattern = Full() if pattern is None else pattern
    mask, scale = arguments.get("attn_mask"), arguments.get("scale")
    is_causal_object = is_causal_bias(mask)
    if arguments.get("is_causal") or (is_causal_object and starts_at_first_key(mask)):
        # With torch's flag, query 0 may attend only to key 0, whatever the lengths.
        rows, columns = range(q_len), range(kv_len)
        rule = both(pattern, Causal())
        return AttentionMatrix(query, key, rule, scale=scale, q_positions=rows, kv_positions=columns)
    if mask is None or is_causal_object:
        return AttentionMatrix(query, key, both(pattern, Full() if mask is None else Causal()), scale=scale)
    mask = mask.expand(torch.broadcast_shapes(mask.shape, (q_len, kv_len))) if mask.dim() < 2 else mask
    if mask.dim() > 4 or (mask.dim() == 4 and len(shape) != 1):
        mask = mask.expand(*shape, heads, *mask.shape[-2:]).reshape(-1, heads, *mask.shape[-2:])
    mask = mask[(None,) * (4 - mask.dim())]
    rule, bias = rule_of_tensor(mask, kv_len)
    return AttentionMatrix(query, key, both(pattern, rule), bias=bias, scale=scale)


def unsupported_sdpa(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the reason why `run_sdpa` cannot run a call to torch's SDPA, or "" if it can."""
    arguments = sdpa_arguments(args, kwargs)
    return "its tensors are nested" if is_nested(arguments["query"], arguments["key"], arguments["value"]) else ""


def run_sdpa(args: tuple[Any, ...], kwargs: Mapping[str, Any], attend: Attend) -> Tensor | None:
    """Evaluate a call to torch's SDPA using ``attend``; return None if ``attend`` returns None."""
    arguments = sdpa_arguments(args, kwargs)
    query, value = arguments["query"], arguments["value"]
    shape = leading_shape(query, arguments["key"], value)
    dropout_p = float(arguments.get("dropout_p") or 0.0)
    call = Call(lambda rule: sdpa_matrix(arguments, rule), flatten_leading(value, shape), query.shape[-2], dropout_p)
    redirected = attend(call)
    if redirected is None:
        return None
    out = redirected.out
    return out.reshape(*shape, *out.shape[1:]) if query.dim() > 2 else out[0, 0]


def _nested_matrix(query: Tensor, key: Tensor, arguments: Mapping[str, Any]) -> AttentionMatrix:
    """Return the packed matrix of a call to torch's SDPA on nested tensors; torch accepts no mask for these."""
    items, is_causal = Nested.of(query, key, key, axis=1), bool(arguments.get("is_causal"))
    if is_causal and items.q_lengths != items.kv_lengths:
        reason = "is_causal=True with nested queries and keys of different lengths depends on torch's kernel"
        raise unsupported(
            "scaled_dot_product_attention",
            [reason],
            hint="dense tensors, or saccade.attention(..., masks.Causal())",
        )
    rule = items.mask(Causal() if is_causal else None, items.query.shape[1])
    positions: dict[str, Any] = {**items.positions}
    return AttentionMatrix(items.query, items.key, rule, scale=arguments.get("scale"), **positions)


def flatten_leading(x: Tensor, shape: torch.Size) -> Tensor:
    """Expand the leading dimensions of an SDPA input ``[..., heads, len, width]`` to ``shape``, and flatten them."""
    x = x if x.dim() > 2 else x[None]
    return x.expand(*shape, *x.shape[-3:]).reshape(-1, *x.shape[-3:])
