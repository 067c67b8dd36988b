"""Allocate cache buffers (on huge pages where available), reuse them, and copy buffers that are not writable."""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.support.torch_modes import is_plain

_HUGE = 2 << 20  # bytes of a huge page on x86-64, and on arm64 with 4 KB pages
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # only on Linux
_MAX_REUSED = 1 << 26  # largest buffer in bytes that `reused` keeps; larger ones are allocated each time


def empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an uninitialised buffer with the dtype and device of a tensor.

    A decoding step that reads ordinary 4 KB pages spends part of its time on address translation. A huge page needs
    only one page-table entry for 2 MB, but torch does not request huge pages. On the CPU, this function requests them
    wherever a whole page fits into the buffer, so the buffer takes no more memory than a tensor. Copies of the buffer
    are ordinary tensors.

    Args:
        like: a tensor with the dtype and device of the buffer.
        shape: shape of the buffer.
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
    with contextlib.suppress(OSError):  # without huge pages in the system, use ordinary pages
        room.madvise(_ADVICE, start, size // _HUGE * _HUGE)
    return pages[start : start + size].view(like.dtype).view(*shape)


def usable(x: Tensor) -> Tensor:
    """Return a cache buffer, or a copy of it if it is an inference tensor and inference mode has ended.

    Outside of inference mode, an inference tensor cannot be written to or take part in an autograd graph. Call this
    function before using a tensor that was stored by an earlier call. It costs nothing unless it has to copy.
    """
    return x.clone() if x.is_inference() and not torch.is_inference_mode_enabled() else x


class _ThreadBuffers(threading.local):
    def __init__(self) -> None:
        self.pieces: dict[tuple[str, torch.device], Tensor] = {}


_BUFFERS = _ThreadBuffers()


def reused(name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return an uninitialised buffer for one decoding step. The next call with the same name overwrites it.

    Allocating new pages costs more than filling them. All caches of a thread share one buffer for each name and
    device. No cache counts it in its ``nbytes``.
    """
    size = math.prod(shape) * like.element_size()
    if size > _MAX_REUSED:
        return empty(like, shape)
    key = (name, like.device)
    piece = _BUFFERS.pieces.get(key)
    if piece is None or piece.numel() < size:
        with torch.inference_mode(False):  # an inference tensor could not be written to later
            piece = _BUFFERS.pieces[key] = empty(torch.empty(0, dtype=torch.uint8, device=like.device), (size,))
    return piece[:size].view(like.dtype).view(shape)
