"""Sliding windows among masks."""

from __future__ import annotations

import numpy as np

from saccade.models.decoder_config import DecoderConfig
from saccade.plan import ALL, Groups
from saccade.plan.spans import Universe

__all__ = ["window_of"]

_FAR = (1 << 62) - 1  # a position before which any window has begun


def window_of(config: DecoderConfig) -> int | None:
    """The last tokens that a token sees, itself included; None where the mask is no plain sliding window."""
    mask = config.causal_mask
    if not (mask.is_relative and mask.is_causal):
        return None
    # A rule that reads distances alone says of one row, far from the beginning, what it says of all.
    row = np.asarray([_FAR])
    needed, sure = mask.bounds(Groups(np.asarray([ALL]), row, row), Universe(np.asarray([0]), row + 1))
    seen = needed.starts < needed.ends
    if seen.sum() != 1 or int(needed.sizes()[0]) != int(sure.sizes()[0]):
        return None
    first, stop = int(needed.starts[seen][0]), int(needed.ends[seen][0])
    return stop - first if first > 0 and stop == _FAR + 1 else None
