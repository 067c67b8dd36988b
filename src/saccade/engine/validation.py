"""Checks of the inputs of a score matrix, before any work is done."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine.nested import check_dense
from saccade.masks import Mask
from saccade.positions import Bias
from saccade.scores import Modified, Score
from saccade.scores.base import ScoreMod
from saccade.support.errors import describe, kind, type_error, value_error
from saccade.support.numerics import wide_dtype
from saccade.support.torch_modes import is_autocast
from saccade.support.validation import check_number, check_type

_CAST = (torch.float32, torch.bfloat16, torch.float16)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# How a tensor of fewer dimensions becomes one of four.
_FOR_FEWER = {
    2: "[len, head_dim] becomes one by x[None, None]",
    3: "[batch, len, head_dim] becomes one by x[:, None], [heads, len, head_dim] by x[None]",
}


def check_query_key(query: Tensor, key: Tensor, score: Score | None) -> tuple[int, int, int, int]:
    """Return the matrix's shape, ``(batch, heads, q_len, kv_len)``; raise if query and key do not fit together."""
    if not (isinstance(query, Tensor) and isinstance(key, Tensor)):
        for name, x in (("query", query), ("key", key)):
            check_type(name, x, Tensor, "be a tensor")
    if query.is_nested or key.is_nested:
        check_dense(query=query, key=key)
    if score is not None:
        score.check(query, key)
    q_shape, k_shape = query.shape, key.shape
    if len(q_shape) == 4 and len(k_shape) == 4 and query.dtype in _DTYPES:
        batch, heads, q_len, head_dim = q_shape
        kv_batch, groups, kv_len, key_dim = k_shape
        divides = heads == groups or (groups and heads % groups == 0)
        if batch == kv_batch and (head_dim == key_dim or score is not None) and divides:
            if query.dtype != key.dtype or (not (query.is_cpu and key.is_cpu) and query.device != key.device):
                check_alike(query=query, key=key)
            return (batch, heads, q_len, kv_len)
    raise _explained(query, key, score)


def _explained(query: Tensor, key: Tensor, score: Score | None) -> Exception:
    """Why this query and key do not fit: found out only once it is known that they do not."""
    facts = [describe("query", query), describe("key", key)]
    for name, x in (("query", query), ("key", key)):
        if x.dim() != 4:
            rule = "have four dimensions, [batch, heads, len, head_dim]"
            return value_error(name, rule, list(x.shape), facts=facts, hint=_FOR_FEWER.get(x.dim()))
    if query.dtype not in _DTYPES:
        rule = "be float32, float64, bfloat16 or float16"
        return type_error("query", rule, str(query.dtype).removeprefix("torch."), facts=facts)
    for axis, name in ((0, "batch"), (3, "head_dim"))[: 2 if score is None else 1]:
        if query.shape[axis] != key.shape[axis]:
            got = f"{query.shape[axis]} and {key.shape[axis]}"
            return value_error(name, "be the same for query and key", got, facts=facts)
    hint = "head h reads key head h // (heads // kv_heads)"
    got = f"{query.shape[1]} query heads and {key.shape[1]} key heads"
    return value_error("key heads", "divide query heads", got, facts=facts, hint=hint)


def as_score(score: Score | ScoreMod) -> Score:
    """Return a score as it is; a function becomes the dot product changed by it."""
    if isinstance(score, Score):
        return score
    if callable(score) and not isinstance(score, type | Mask | Bias):
        return Modified(score)
    hint = "saccade.scores has some; a mask goes to mask=, a tensor or a term by distance to bias="
    got = score.__name__ if isinstance(score, type) else kind(score)
    rule = "be a saccade Score, a function (score, b, h, q, kv) -> score, or None"
    raise type_error("score", rule, got, hint=hint)


def autocast(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Cast a tensor to the type that autocast gives to the arguments of attention, where it is switched on.

    That is torch's rule for ``F.scaled_dot_product_attention``: single and half precision become the half precision of
    autocast (or ``dtype``), float64 stays.
    """
    if not isinstance(x, Tensor) or not is_autocast(x):
        return x
    dtype = torch.get_autocast_dtype(x.device.type) if dtype is None else dtype
    return x.to(dtype) if x.dtype in _CAST and dtype in _CAST else x


def check_alike(**tensors: Tensor) -> None:
    """Raise unless all tensors have one dtype and one device."""
    first, *others = tensors.values()
    dtype, device = first.dtype, first.device
    for other in others:
        if other.dtype != dtype or other.device != device:
            what = "dtype" if other.dtype != dtype else "device"
            got = " and ".join(str(getattr(x, what)).removeprefix("torch.") for x in (first, other))
            facts = [describe(name, x) for name, x in tensors.items()]
            raise value_error(what, f"be the same for {', '.join(tensors)}", got, facts=facts)


def check_value(value: Tensor, query: Tensor, key: Tensor, dtype: torch.dtype) -> None:
    """Raise unless ``value`` is ``[batch, kv_heads, kv_len, value_dim]`` of the key's device, and of a dtype."""
    if not isinstance(value, Tensor):
        raise type_error("value", "be a tensor", type(value).__name__)
    if value.is_nested:
        check_dense(value=value)
    if value.dim() != 4 or value.shape[:3] != key.shape[:3]:
        expected = f"[{key.shape[0]}, {key.shape[1]}, {key.shape[2]}, value_dim]"
        facts = [describe("key", key), describe("value", value)]
        raise value_error("value", f"have shape {expected}", list(value.shape), facts=facts)
    if value.dtype != dtype or (not (value.is_cpu and key.is_cpu) and value.device != key.device):
        check_alike(query=query.to(dtype), key=key.to(dtype), value=value)


def checked_scale(scale: float | None) -> float:
    """Return a finite number; 1 for None, which is used only where every score is 0."""
    return 1.0 if scale is None else check_number("scale", scale)


def checked_softcap(softcap: float) -> float:
    """Return a finite number above 0."""
    return check_number("softcap", softcap, above=0.0, hint="None means no cap")


def checked_sink(sink: Tensor, query: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Return a logit for each head, in the dtype of the lse."""
    check_type("sink_logit", sink, Tensor, "be a tensor or None")
    if sink.shape != (shape[1],):
        raise value_error("sink_logit", f"have shape [{shape[1]}], one for each head", list(sink.shape))
    if not sink.is_floating_point():
        raise type_error("sink_logit", "be a float tensor", str(sink.dtype).removeprefix("torch."))
    if sink.device != query.device:
        raise value_error("device", "be the same for query and sink_logit", f"{query.device} and {sink.device}")
    return sink.to(wide_dtype(query.dtype))
