"""What a score matrix refuses, in sentences: ingredients that do not fit together, before any work is done."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.arguments import is_finite_number, is_number
from saccade.engine.bias import DenseTerm
from saccade.errors import describe, type_error, value_error
from saccade.scores import Score

__all__ = [
    "autocast",
    "check_alike",
    "check_query_key",
    "checked_scale",
    "checked_sink",
    "checked_softcap",
    "dense_term",
]

_CAST = (torch.float32, torch.bfloat16, torch.float16)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check_query_key(query: Tensor, key: Tensor, score: Score | None, where: str) -> tuple[int, int, int, int]:
    """The shape of their matrix, ``(batch, heads, q_len, kv_len)``; raise if query and key do not fit together."""
    for name, x in (("query", query), ("key", key)):
        if not isinstance(x, Tensor):
            raise type_error(where, name, "be a tensor", type(x).__name__)
    if score is not None:
        if not isinstance(score, Score):
            hint = "saccade.scores has some; a mask goes to mask=, a tensor to bias="
            raise type_error(where, "score", "be a saccade Score or None", type(score).__name__, hint=hint)
        score.check(query, key, where)
    q_shape, k_shape = query.shape, key.shape
    if len(q_shape) == 4 and len(k_shape) == 4 and query.dtype in _DTYPES:
        batch, heads, q_len, head_dim = q_shape
        kv_batch, groups, kv_len, key_dim = k_shape
        divides = heads == groups or (groups and heads % groups == 0)
        if batch == kv_batch and (head_dim == key_dim or score is not None) and divides:
            if query.dtype != key.dtype or query.device != key.device:
                check_alike(where, query=query, key=key)
            return (batch, heads, q_len, kv_len)
    raise _explained(query, key, score, where)


def _explained(query: Tensor, key: Tensor, score: Score | None, where: str) -> Exception:
    """Why this query and key do not fit: found out only once it is known that they do not."""
    facts = [describe("query", query), describe("key", key)]
    for name, x in (("query", query), ("key", key)):
        if x.dim() != 4:
            rule = "have four dimensions, [batch, heads, len, head_dim]"
            return value_error(where, name, rule, list(x.shape), facts=facts)
    if query.dtype not in _DTYPES:
        rule = "be float32, float64, bfloat16 or float16"
        return type_error(where, "query", rule, str(query.dtype).removeprefix("torch."), facts=facts)
    for axis, name in ((0, "batch"), (3, "head_dim"))[: 2 if score is None else 1]:
        if query.shape[axis] != key.shape[axis]:
            got = f"{query.shape[axis]} and {key.shape[axis]}"
            return value_error(where, name, "be the same for query and key", got, facts=facts)
    hint = "head h reads key head h // (heads // kv_heads)"
    got = f"{query.shape[1]} query heads and {key.shape[1]} key heads"
    return value_error(where, "key heads", "divide query heads", got, facts=facts, hint=hint)


def autocast(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor in the type that autocast gives to the arguments of attention, where it is switched on.

    That is torch's rule for ``F.scaled_dot_product_attention``: single and half precision become the half precision of
    autocast (or ``dtype``), float64 stays.
    """
    if not isinstance(x, Tensor) or x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return x
    dtype = torch.get_autocast_dtype(x.device.type) if dtype is None else dtype
    return x.to(dtype) if x.dtype in _CAST and dtype in _CAST else x


def check_alike(where: str, **tensors: Tensor) -> None:
    """Raise unless all tensors have one dtype and one device."""
    first, *others = tensors.values()
    dtype, device = first.dtype, first.device
    for other in others:
        if other.dtype != dtype or other.device != device:
            what = "dtype" if other.dtype != dtype else "device"
            got = " and ".join(str(getattr(x, what)).removeprefix("torch.") for x in (first, other))
            facts = [describe(name, x) for name, x in tensors.items()]
            raise value_error(where, what, f"be the same for {', '.join(tensors)}", got, facts=facts)


def checked_scale(scale: float | None, where: str) -> float:
    """A finite number; 1 for None, which is met only where every score is 0."""
    if scale is None:  # head_dim 0: every score is 0, whatever the scale
        return 1.0
    if not is_number(scale):
        raise type_error(where, "scale", "be a float or None", type(scale).__name__)
    if not is_finite_number(scale):
        raise value_error(where, "scale", "be finite", scale)
    return float(scale)


def checked_softcap(softcap: float | None, where: str) -> float | None:
    """A finite number above 0, or None."""
    if softcap is None:
        return None
    if not is_number(softcap):
        raise type_error(where, "softcap", "be a float or None", type(softcap).__name__)
    if not (is_finite_number(softcap) and softcap > 0):
        raise value_error(where, "softcap", "be finite and above 0", softcap, hint="None means no cap")
    return float(softcap)


def checked_sink(sink: Tensor, query: Tensor, shape: tuple[int, int, int, int], where: str) -> Tensor:
    """A logit for each head, in the dtype of the lse."""
    if not isinstance(sink, Tensor):
        raise type_error(where, "sink_logit", "be a tensor or None", type(sink).__name__)
    if sink.shape != (shape[1],):
        raise value_error(where, "sink_logit", f"have shape [{shape[1]}], one for each head", list(sink.shape))
    if not sink.is_floating_point():
        raise type_error(where, "sink_logit", "be a float tensor", str(sink.dtype).removeprefix("torch."))
    if sink.device != query.device:
        raise value_error(where, "device", "be the same for query and sink_logit", f"{query.device} and {sink.device}")
    return sink.to(torch.float64 if query.dtype == torch.float64 else torch.float32)


def dense_term(bias: Tensor, query: Tensor, shape: tuple[int, int, int, int], where: str) -> DenseTerm:
    """A bias that broadcasts to the matrix, as a term of its scores."""
    if not isinstance(bias, Tensor):
        raise type_error(where, "bias", "be a tensor, a saccade positions.Bias or None", type(bias).__name__)
    if bias.dtype == torch.bool:
        hint = "True = may attend is a mask: pass it as mask="
        raise type_error(where, "bias", "be a float tensor", "bool", hint=hint)
    if not bias.is_floating_point():
        raise type_error(where, "bias", "be a float tensor", str(bias.dtype).removeprefix("torch."))
    if query.dtype == torch.float64:
        bias = bias.to(torch.float64)
    elif bias.dtype != query.dtype:
        bias = bias.to(torch.float32)  # which scores are computed in
    if bias.device != query.device:
        raise value_error(where, "device", "be the same for query and bias", f"{query.device} and {bias.device}")
    fits = bias.dim() <= 4 and all(
        own in (1, size) for own, size in zip(reversed(bias.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise value_error(where, "bias", f"broadcast to {list(shape)}", list(bias.shape))
    return DenseTerm(bias.reshape((1,) * (4 - bias.dim()) + bias.shape))
