"""Scratch memory that is used again: fresh pages cost more than the copy that fills them."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

from saccade.caches.memory import empty

__all__ = ["scratch"]

_KEPT = 1 << 26  # bytes; larger pieces are made anew


class _Pages(threading.local):
    def __init__(self) -> None:
        self.held: dict[tuple[str, torch.device], Tensor] = {}


_PAGES = _Pages()


def scratch(name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Uninitialized memory in the dtype and on the device of ``like``; the next call of that name overwrites it.

    One piece for each thread and name, shared by all caches; no cache holds it, and none counts it.
    """
    size = math.prod(shape) * like.element_size()
    if size > _KEPT:
        return empty(like, shape)
    key = (name, like.device)
    held = _PAGES.held.get(key)
    if held is None or held.numel() < size:
        with torch.inference_mode(False):  # memory made in inference mode could not be written to outside of it
            held = _PAGES.held[key] = empty(torch.empty(0, dtype=torch.uint8, device=like.device), (size,))
    return held[:size].view(like.dtype).view(shape)
