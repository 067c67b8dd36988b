"""Sliding windows among masks."""

from __future__ import annotations

from saccade.masks import Causal, Window
from saccade.masks.algebra import And
from saccade.models.decoder_config import DecoderConfig

__all__ = ["window_of"]


def window_of(config: DecoderConfig) -> int | None:
    """The last tokens that a token sees, itself included; None where the mask is no plain sliding window."""
    mask = config.causal_mask
    if not isinstance(mask, And) or len(mask.parts) != 2:
        return None
    windows = [part for part in mask.parts if isinstance(part, Window) and part.left is not None]
    if Causal() not in mask.parts or len(windows) != 1:
        return None
    left = windows[0].left
    return None if left is None else left + 1
