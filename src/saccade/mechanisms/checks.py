"""What approximate mechanisms are told, checked before any work is done."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.arguments import is_finite_number, is_integer, is_number
from saccade.engine.at_positions import check_domain
from saccade.engine.checks import autocast, check_query_key
from saccade.errors import type_error, unsupported, value_error
from saccade.masks import Mask, as_mask
from saccade.mechanisms.base import Mechanism
from saccade.mechanisms.readable import is_surely_finite
from saccade.positions.tokens import GivenPositions, Positions

__all__ = ["Inputs", "check_count", "check_number", "checked_inputs", "checked_scale"]


class Inputs(NamedTuple):
    """Queries and keys that fit together, and the mask for them.

    Attributes:
        query: ``[batch, heads, q_len, head_dim]``, in float32 or wider; 0 where it was not finite.
        key: ``[batch, kv_heads, kv_len, head_dim]``, in float32 or wider; 0 where it was not finite.
        tainted: bool ``[batch, kv_heads, kv_len]``, keys that were not finite; None where there are surely none.
        spoilt: bool ``[batch, heads, q_len]``, queries that were not finite; None where there are surely none.
        rule: the mask.
        shape: (batch, heads, q_len, kv_len).
        q_positions, kv_positions: where the tokens stand; None, a range or a tensor.
        dtype: of products: that of the query, or of autocast.
    """

    query: Tensor
    key: Tensor
    tainted: Tensor | None
    spoilt: Tensor | None
    rule: Mask
    shape: tuple[int, int, int, int]
    q_positions: range | Tensor | None
    kv_positions: range | Tensor | None
    dtype: torch.dtype


def checked_inputs(
    mechanism: Mechanism,
    query: Tensor,
    key: Tensor,
    mask: object,
    q_positions: GivenPositions,
    kv_positions: GivenPositions,
) -> Inputs:
    """Raise unless queries and keys fit together, and the mechanism takes the mask."""
    where = type(mechanism).__name__
    query, key = autocast(query), autocast(key)
    shape = check_query_key(query, key, None, where)
    rule = as_mask(mask, shape, where=where)
    batch, _, q_len, kv_len = shape
    q = None if q_positions is None else Positions.of(q_positions, where, "q_positions", length=q_len, batch=batch)
    kv = None if kv_positions is None else Positions.of(kv_positions, where, "kv_positions", length=kv_len, batch=batch)
    check_domain(rule, q, kv, q_len, kv_len, where)
    reasons = mechanism.reasons(rule)
    if reasons:
        hint = "saccade.mechanisms.Softmax() takes every mask"
        raise unsupported(where, f"mask={type(rule).__name__}", reasons, hint=hint)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    spoilt, tainted = (None if is_surely_finite(x) else ~torch.isfinite(x.detach()).all(-1) for x in (query, key))
    dtype = query.dtype
    query = query if spoilt is None else query.masked_fill(spoilt[..., None], 0.0)
    key = key if tainted is None else key.masked_fill(tainted[..., None], 0.0)
    q_given, kv_given = (None if x is None else x.given for x in (q, kv))
    return Inputs(query.to(wide), key.to(wide), tainted, spoilt, rule, shape, q_given, kv_given, dtype)


def check_count(where: str, name: str, count: object) -> int:
    """An int of at least 1."""
    if not is_integer(count):
        raise type_error(where, name, "be an int of at least 1", repr(count))
    if count < 1:
        raise value_error(where, name, "be an int of at least 1", count)
    return int(count)


def check_number(where: str, name: str, number: object, *, least: float = -math.inf) -> float:
    """A finite number, not below ``least``."""
    rule = "be a finite number" + (f" of at least {least:g}" if least > -math.inf else "")
    if not is_number(number):
        raise type_error(where, name, rule, repr(number))
    if not is_finite_number(number) or number < least:
        raise value_error(where, name, rule, number)
    return float(number)


def checked_scale(where: str, scale: object) -> float | None:
    """A finite number, or None."""
    return None if scale is None else check_number(where, "scale", scale)
