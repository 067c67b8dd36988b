"""Convert mask tensors to mask rules and score biases."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.masks import Dense, Full, Mask
from saccade.support.errors import type_error
from saccade.support.torch_modes import is_tracing
from saccade.support.validation import check_holds_values


def mask_of_tensor(mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Split a mask tensor, as torch's kernels take it, into a bool mask of allowed pairs and a score bias.

    Args:
        mask: bool, True = may attend; or an additive float mask, in which -inf or the lowest number of the dtype masks
            a pair.

    Returns:
        Two tensors: the bool mask (None if all pairs are allowed) and the float bias (None if nothing is added). For a
        float mask in a traced program, neither is None, because its values cannot be read.

    Raises:
        TypeError: the mask is neither bool nor float, which torch's kernels refuse as well.
    """
    check_holds_values("attn_mask", mask)
    if mask.dtype == torch.bool:
        return mask, None
    if not mask.is_floating_point():
        raise type_error(
            "attn_mask", "be bool or float", mask.dtype, hint="mask.bool(), if 1 means that a query may attend"
        )
    # The lowest number plus any score or bias is still below half the lowest number.
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    added = mask.masked_fill(hidden, 0.0)
    if is_tracing():
        return ~hidden, added
    has_terms = bool((added != 0).any()) or mask.requires_grad
    return (None if not bool(hidden.any()) else ~hidden), (added if has_terms else None)


def rule_of_tensor(mask: Tensor, kv_len: int) -> tuple[Mask, Tensor | None]:
    """Convert a mask tensor to a mask rule for ``kv_len`` keys and a score bias.

    Args:
        mask: ``[batch | 1, heads | 1, q_len | 1, kv_len | 1]``.
        kv_len: number of keys.
    """
    allowed, added = mask_of_tensor(mask)
    return (Full() if allowed is None else Dense(allowed.expand(*allowed.shape[:-1], kv_len))), added


def both(rule: Mask, other: Mask) -> Mask:
    """Combine two mask rules with ``&``; if one of them allows every pair, return the other."""
    if isinstance(rule, Full):
        return other
    return rule if isinstance(other, Full) else rule & other


def joined(rule: Mask | None, other: Mask | None) -> Mask | None:
    """Combine two mask rules with ``&``; None means no rule."""
    return rule if other is None else other if rule is None else both(rule, other)
