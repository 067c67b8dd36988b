"""Convert masks that are tensors to rules and biases."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.masks import Dense, Full, Mask
from saccade.support.validation import check_holds_values


def mask_of_tensor(mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Split a mask of torch's kernels into allowed pairs, and terms that are added to the scores.

    Args:
        mask: bool, True = may attend; or float terms, in which -inf, or the lowest number of the dtype, hides a pair.

    Returns:
        A bool tensor, or None if all pairs are allowed; a float tensor, or None if nothing is added.
    """
    check_holds_values("attn_mask", mask)
    if mask.dtype == torch.bool:
        return mask, None
    # Adding a score or another term to the lowest number leaves more than half of it.
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    added = mask.masked_fill(hidden, 0.0)
    has_terms = bool((added != 0).any()) or mask.requires_grad
    return (None if not bool(hidden.any()) else ~hidden), (added if has_terms else None)


def rule_of_tensor(mask: Tensor, kv_len: int) -> tuple[Mask, Tensor | None]:
    """Convert a mask to a rule for ``kv_len`` keys, and the terms that are added to the scores.

    Args:
        mask: ``[batch | 1, heads | 1, q_len | 1, kv_len | 1]``.
        kv_len: number of keys.
    """
    allowed, added = mask_of_tensor(mask)
    return (Full() if allowed is None else Dense(allowed.expand(*allowed.shape[:-1], kv_len))), added


def both(rule: Mask, other: Mask) -> Mask:
    """Return the conjunction of two rules; one of them if the other allows everything."""
    if isinstance(rule, Full):
        return other
    return rule if isinstance(other, Full) else rule & other
