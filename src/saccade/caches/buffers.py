"""Memory for caches: on huge pages where the system has them, of use in every gradient mode, or used again."""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.support.torch_modes import is_plain

__all__ = ["empty", "reused", "usable"]

_HUGE = 2 << 20  # bytes of a huge page, of x86-64 and of arm64 with pages of 4 KB
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux has it
_KEPT = 1 << 26  # bytes that `reused` keeps; larger pieces are made anew


def empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return uninitialised memory of a tensor's dtype and device; a copy of it is an ordinary tensor.

    A step over ordinary pages, of 4 KB, spends a part of its time on looking up where the pages of keys and values are.
    A huge page is one entry of that table for 2 MB. Torch does not ask for them; this does, for the whole huge
    pages of a tensor on a CPU, so that no more memory is taken than the tensor has.

    Args:
        like: gives dtype and device.
        shape: of the new tensor.
    """
    size = math.prod(shape) * like.element_size()
    if _ADVICE is None or size < _HUGE or like.device.type != "cpu" or not is_plain(like):
        return like.new_empty(shape)
    try:
        # Private: pages that are shared with other processes are never huge. What is not touched takes no memory.
        room = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        return like.new_empty(shape)  # torch says that there is not so much
    held = torch.frombuffer(room, dtype=torch.uint8)
    start = -held.data_ptr() % _HUGE
    with contextlib.suppress(OSError):  # a system without huge pages says so here: its ordinary ones hold as much
        room.madvise(_ADVICE, start, size // _HUGE * _HUGE)
    return held[start : start + size].view(like.dtype).view(*shape)


def usable(x: Tensor) -> Tensor:
    """Return the tensor, or a copy if it is an inference tensor and inference mode has ended.

    Memory that is made there may neither be written to outside of it nor be part of a graph. Whoever remembers a tensor
    from one call to the next therefore asks here first: it costs a copy when the mode has changed, and nothing else.
    """
    return x.clone() if x.is_inference() and not torch.is_inference_mode_enabled() else x


class _Kept(threading.local):
    def __init__(self) -> None:
        self.pieces: dict[tuple[str, torch.device], Tensor] = {}


_MINE = _Kept()


def reused(name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return uninitialised memory for one step, of a tensor's dtype and device; the next call of that name overwrites
    it.

    Fresh pages cost more than the copy that fills them. There is one piece for each thread and name, shared by all
    caches; no cache holds it, and none counts it.
    """
    size = math.prod(shape) * like.element_size()
    if size > _KEPT:
        return empty(like, shape)
    key = (name, like.device)
    kept = _MINE.pieces.get(key)
    if kept is None or kept.numel() < size:
        with torch.inference_mode(False):  # memory made in inference mode could not be written to outside of it
            kept = _MINE.pieces[key] = empty(torch.empty(0, dtype=torch.uint8, device=like.device), (size,))
    return kept[:size].view(like.dtype).view(shape)
