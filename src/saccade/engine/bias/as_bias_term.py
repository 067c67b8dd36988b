"""Conversion of a user's bias into a term that is added to the scores."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine.bias.relative import distance_term
from saccade.engine.bias.term import DenseTerm, Term
from saccade.masks import Mask
from saccade.positions import Bias
from saccade.support.errors import type_error, value_error
from saccade.support.validation import check_holds_values, check_type


def bias_term(
    bias: Tensor | Bias,
    query: Tensor,
    shape: tuple[int, int, int, int],
    rule: Mask,
    origin: tuple[int, int],
    scale: float,
) -> Term:
    """Check a user's bias, and return it as a term.

    Args:
        bias: a tensor that broadcasts to the matrix, or a rule that is read at distances.
        query: as the user gave it.
        shape: (batch, heads, q_len, kv_len).
        rule, origin: as `saccade.engine.positions.positioned_mask.resolve_positions` returns them.
        scale: factor of the scores.
    """
    if isinstance(bias, Bias):
        return distance_term(bias, query, shape, rule, origin, scale)
    return _dense(bias, query, shape)


def _dense(bias: Tensor, query: Tensor, shape: tuple[int, int, int, int]) -> DenseTerm:
    check_type("bias", bias, Tensor, "be a tensor, a saccade positions.Bias or None")
    check_holds_values("bias", bias)
    if not bias.is_floating_point():
        hint = "True = may attend is a mask: pass it as mask=" if bias.dtype == torch.bool else None
        raise type_error("bias", "be a float tensor", str(bias.dtype).removeprefix("torch."), hint=hint)
    if query.dtype == torch.float64:
        bias = bias.to(torch.float64)
    elif bias.dtype != query.dtype:
        bias = bias.to(torch.float32)  # which scores are computed in
    if bias.device != query.device:
        raise value_error("device", "be the same for query and bias", f"{query.device} and {bias.device}")
    sizes = zip(reversed(bias.shape), reversed(shape), strict=False)
    if bias.dim() > 4 or any(own not in (1, size) for own, size in sizes):
        raise value_error("bias", f"broadcast to {list(shape)}", list(bias.shape))
    return DenseTerm(bias.reshape((1,) * (4 - bias.dim()) + bias.shape))
