"""Validate the arguments that a user passes to attention, and convert them to the form that kernels read."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine.bias.relative import distance_term
from saccade.engine.bias.term import DenseTerm, Term
from saccade.engine.nested import check_dense
from saccade.masks import Mask
from saccade.positions import Bias
from saccade.scores import Modified, Score
from saccade.scores.base import ScoreMod
from saccade.support.errors import describe, kind, type_error, value_error
from saccade.support.numerics import wide_dtype
from saccade.support.torch_modes import is_autocast
from saccade.support.validation import check_holds_values, check_number, check_type

_CAST = (torch.float32, torch.bfloat16, torch.float16)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# How to add dimensions to a tensor with fewer than four.
_FOR_FEWER = {
    2: "for [len, head_dim], pass x[None, None]",
    3: "for [batch, len, head_dim], pass x[:, None]; for [heads, len, head_dim], pass x[None]",
}


def check_query_key(query: Tensor, key: Tensor, score: Score | None) -> tuple[int, int, int, int]:
    """Check that query and key match. Return the shape of the attention matrix, ``(batch, heads, q_len, kv_len)``."""
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
    raise _shape_error(query, key, score)


def _shape_error(query: Tensor, key: Tensor, score: Score | None) -> Exception:
    """Return the error for query and key tensors whose shapes do not match."""
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
    """Convert the score argument to a `Score`. A plain function is applied to the scores of dot products."""
    if isinstance(score, Score):
        return score
    if callable(score) and not isinstance(score, type | Mask | Bias):
        return Modified(score)
    hint = "see saccade.scores; pass a mask as mask=, and a tensor or a position bias as bias="
    got = score.__name__ if isinstance(score, type) else kind(score)
    rule = "be a saccade Score, a function (score, b, h, q, kv) -> score, or None"
    raise type_error("score", rule, got, hint=hint)


def autocast(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Convert a tensor argument to the dtype that autocast prescribes. Without autocast, return it unchanged.

    This is torch's rule for ``F.scaled_dot_product_attention``: single and half precision become the half precision of
    autocast (or ``dtype``), and float64 stays unchanged.
    """
    if not isinstance(x, Tensor) or not is_autocast(x):
        return x
    dtype = torch.get_autocast_dtype(x.device.type) if dtype is None else dtype
    return x.to(dtype) if x.dtype in _CAST and dtype in _CAST else x


def check_alike(**tensors: Tensor) -> None:
    """Raise an error, which lists the tensors by name, unless all of them have the same dtype and device."""
    first, *others = tensors.values()
    dtype, device = first.dtype, first.device
    for other in others:
        if other.dtype != dtype or other.device != device:
            what = "dtype" if other.dtype != dtype else "device"
            got = " and ".join(str(getattr(x, what)).removeprefix("torch.") for x in (first, other))
            facts = [describe(name, x) for name, x in tensors.items()]
            raise value_error(what, f"be the same for {', '.join(tensors)}", got, facts=facts)


def check_value(value: Tensor, query: Tensor, key: Tensor, dtype: torch.dtype) -> None:
    """Check that ``value`` is ``[batch, kv_heads, kv_len, value_dim]``, in the given dtype and on the key's device."""
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
    """Check the scale and return it as a finite number. None, which is passed only if every score is 0, gives 1."""
    return 1.0 if scale is None else check_number("scale", scale)


def checked_softcap(softcap: float) -> float:
    """Check the softcap and return it as a finite number above 0."""
    return check_number("softcap", softcap, above=0.0, hint="None means no cap")


def checked_sink(sink: Tensor, query: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Check the sink logits, one for each head, and return them in the dtype of the lse."""
    check_type("sink_logit", sink, Tensor, "be a tensor or None")
    if sink.shape != (shape[1],):
        raise value_error("sink_logit", f"have shape [{shape[1]}], one for each head", list(sink.shape))
    if not sink.is_floating_point():
        raise type_error("sink_logit", "be a float tensor", str(sink.dtype).removeprefix("torch."))
    if sink.device != query.device:
        raise value_error("device", "be the same for query and sink_logit", f"{query.device} and {sink.device}")
    return sink.to(wide_dtype(query.dtype))


def bias_term(
    bias: Tensor | Bias,
    query: Tensor,
    shape: tuple[int, int, int, int],
    rule: Mask,
    origin: tuple[int, int],
    scale: float,
) -> Term:
    """Check the user's bias and convert it to a `Term`.

    Args:
        bias: a tensor that broadcasts to the attention matrix, or a `Bias`, which depends on distances.
        query: the user's query tensor.
        shape: (batch, heads, q_len, kv_len).
        rule, origin: as `saccade.engine.positions.positioned_mask.resolve_positions` returns them.
        scale: factor that multiplies the scores.
    """
    if isinstance(bias, Bias):
        return distance_term(bias, query, shape, rule, origin, scale)
    return _dense(bias, query, shape)


def _dense(bias: Tensor, query: Tensor, shape: tuple[int, int, int, int]) -> DenseTerm:
    check_type("bias", bias, Tensor, "be a tensor, a saccade positions.Bias or None")
    check_holds_values("bias", bias)
    if not bias.is_floating_point():
        hint = "a bool tensor is a mask: pass it as mask=" if bias.dtype == torch.bool else None
        raise type_error("bias", "be a float tensor", str(bias.dtype).removeprefix("torch."), hint=hint)
    if query.dtype == torch.float64:
        bias = bias.to(torch.float64)
    elif bias.dtype != query.dtype:
        bias = bias.to(torch.float32)  # the dtype of scores
    if bias.device != query.device:
        raise value_error("device", "be the same for query and bias", f"{query.device} and {bias.device}")
    sizes = zip(reversed(bias.shape), reversed(shape), strict=False)
    if bias.dim() > 4 or any(bias_size not in (1, size) for bias_size, size in sizes):
        raise value_error("bias", f"broadcast to {list(shape)}", list(bias.shape))
    return DenseTerm(bias.reshape((1,) * (4 - bias.dim()) + bias.shape))
