"""Memory of what is remembered: on huge pages, where the system has them, and of use in every gradient mode."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.transforms import is_plain

__all__ = ["empty", "usable"]

_HUGE = 2 << 20  # bytes of a huge page, of x86-64 and of arm64 with pages of 4 KB
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux has it


def empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Memory of a tensor's dtype and device, not filled; a copy of it is an ordinary tensor.

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
    """The tensor, or a copy where it was made in inference mode and that is over.

    Memory that is made there may neither be written to outside of it nor be part of a graph. Whoever remembers a tensor
    from one call to the next therefore asks here first: it costs a copy when the mode has changed, and nothing else.
    """
    return x.clone() if x.is_inference() and not torch.is_inference_mode_enabled() else x
