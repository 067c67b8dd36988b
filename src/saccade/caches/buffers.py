"""Memory buffers of caches: on huge pages if the system has them, usable in every gradient mode, or reused."""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.support.torch_modes import is_plain

_HUGE = 2 << 20  # bytes of a huge page, of x86-64 and of arm64 with pages of 4 KB
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux has it
_KEPT = 1 << 26  # bytes that `reused` stores at most; larger pieces are allocated each time


def empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an uninitialised buffer of a tensor's dtype and device; copying it gives an ordinary tensor.

    A step over ordinary pages of 4 KB spends part of its time on address translation. A huge page is one entry of the
    page table for 2 MB. Torch does not request huge pages; this function does, for the whole huge pages of a tensor on
    a CPU, so that it takes no more memory than the tensor.

    Args:
        like: gives dtype and device.
        shape: shape of the new tensor.
    """
    size = math.prod(shape) * like.element_size()
    if _ADVICE is None or size < _HUGE or like.device.type != "cpu" or not is_plain(like):
        return like.new_empty(shape)
    try:
        # Private, since shared pages are never huge. Untouched pages take no memory.
        room = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        return like.new_empty(shape)  # torch raises the error for too little memory
    pages = torch.frombuffer(room, dtype=torch.uint8)
    start = -pages.data_ptr() % _HUGE
    with contextlib.suppress(OSError):  # a system without huge pages fails here; ordinary pages work as well
        room.madvise(_ADVICE, start, size // _HUGE * _HUGE)
    return pages[start : start + size].view(like.dtype).view(*shape)


def usable(x: Tensor) -> Tensor:
    """Return the buffer, or a copy if it is an inference tensor and inference mode has ended.

    An inference tensor may neither be written to outside of inference mode nor be part of a graph. Call this before
    using a tensor that was stored in an earlier call: it copies if the mode has changed, and is free otherwise.
    """
    return x.clone() if x.is_inference() and not torch.is_inference_mode_enabled() else x


class _Kept(threading.local):
    def __init__(self) -> None:
        self.pieces: dict[tuple[str, torch.device], Tensor] = {}


_MINE = _Kept()


def reused(name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return an uninitialised buffer for one step; the next call with the same name overwrites it.

    Fresh pages cost more than the copy that fills them. There is one piece for each thread and name, shared by all
    caches; no cache counts it as its memory.
    """
    size = math.prod(shape) * like.element_size()
    if size > _KEPT:
        return empty(like, shape)
    key = (name, like.device)
    piece = _MINE.pieces.get(key)
    if piece is None or piece.numel() < size:
        with torch.inference_mode(False):  # memory made in inference mode could not be written to outside of it
            piece = _MINE.pieces[key] = empty(torch.empty(0, dtype=torch.uint8, device=like.device), (size,))
    return piece[:size].view(like.dtype).view(shape)
