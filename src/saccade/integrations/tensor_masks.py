"""Masks that are written out as tensors, as rules and biases."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.masks import Dense, Full, Mask
from saccade.support.validation import check_holds_values


def mask_of_tensor(mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """A mask as torch's kernels take it: which pairs are allowed, and what is added to the scores of the others.

    Args:
        mask: bool, True = may attend; or float terms, where -inf, or the lowest number of the type, hides a pair.

    Returns:
        A bool tensor, or None if all may attend; a float tensor, or None if nothing is added.
    """
    check_holds_values("attn_mask", mask)
    if mask.dtype == torch.bool:
        return mask, None
    # Halves of the lowest number are what is left of it when a score or another term was added to it.
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    added = mask.masked_fill(hidden, 0.0)
    has_terms = bool((added != 0).any()) or mask.requires_grad
    return (None if not bool(hidden.any()) else ~hidden), (added if has_terms else None)


def rule_of_tensor(mask: Tensor, kv_len: int) -> tuple[Mask, Tensor | None]:
    """The same as a rule for ``kv_len`` keys, and what is added to the scores.

    Args:
        mask: ``[batch | 1, heads | 1, q_len | 1, kv_len | 1]``.
        kv_len: number of keys.
    """
    allowed, added = mask_of_tensor(mask)
    return (Full() if allowed is None else Dense(allowed.expand(*allowed.shape[:-1], kv_len))), added


def both(rule: Mask, other: Mask) -> Mask:
    """What both rules allow; just one of them where the other allows everything."""
    if isinstance(rule, Full):
        return other
    return rule if isinstance(other, Full) else rule & other
