"""Causality of masks: whether a mask lets queries attend to later keys, which do not exist yet during decoding."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from saccade.masks.mask import Mask
from saccade.plan import ALL, Groups
from saccade.plan.key_ranges import KeyDomain, Spans
from saccade.positions.token_positions import Positions

_SPAN = 1 << 40  # number of later keys that are checked
_ROWS, _NEAR, _FAR = 64, 64, 32  # numbers of sampled rows, adjacent later keys, and distant later keys


def sees_later(mask: Mask | None, positions: range | Tensor) -> bool:
    """Return whether a mask lets a query attend to a key after the last of ``positions``.

    If the bounds of the mask are conclusive, they are used. Otherwise, a sample of queries and keys is tested.

    Args:
        mask: the mask; None for full attention.
        positions: positions of the queries: a range, or int64 ``[len]`` or ``[batch, len]``; -1 marks padding.
    """
    if mask is None:
        return len(positions) > 0 if isinstance(positions, range) else positions.numel() > 0
    if mask.is_causal:
        return False
    table = (Positions(positions) if isinstance(positions, range) else Positions(None, positions)).on()
    items = max(len(table), mask.shape[0])
    table = table.cpu().expand(items, -1)
    some = (table >= 0).any(1)
    if not bool(some.any()):
        return False
    first = table.masked_fill(table < 0, _SPAN).amin(1)[some].numpy()
    last = table.amax(1)[some].numpy()
    which = np.arange(items)[some.numpy()] if mask.shape[0] > 1 else np.full(len(last), ALL)
    bounds = mask.bounds(Groups(which, first, last), KeyDomain(last + 1, last + 1 + _SPAN))
    if not _has_keys(bounds.any_row):
        return False
    if _has_keys(bounds.all_rows):
        return True
    return any(_allows_in_sample(mask, item, row[row >= 0]) for item, row in enumerate(table) if bool((row >= 0).any()))


def _has_keys(spans: Spans) -> bool:
    """Return whether any of the ranges of later keys is non-empty."""
    return bool((spans.starts < spans.ends).any())


def _allows_in_sample(mask: Mask, item: int, positions: Tensor) -> bool:
    """Return whether the mask lets any query in a sample attend to a later key."""
    rows = positions[torch.linspace(0, len(positions) - 1, min(_ROWS, len(positions)), device="cpu").round().long()]
    near, far = (torch.arange(1, end + 1, device="cpu") for end in (_NEAR, _FAR))
    away = torch.cat([near, _NEAR * 2**far // 2])
    keys = int(positions.max()) + away
    heads = torch.arange(mask.shape[1], device="cpu")[None, :, None, None]
    b = torch.full((1, 1, 1, 1), item, device="cpu")
    return bool(mask.allows(b, heads, rows[None, None, :, None], keys[None, None, None, :]).any())
