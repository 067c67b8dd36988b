"""``F.scaled_dot_product_attention`` with one backend chosen, on a CPU or a GPU."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.peers.peer import Peer

__all__ = ["CPU", "CUDA", "attend"]


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float | None = None, backend: SDPBackend
) -> Tensor:
    """Pass the mask as ``attn_mask`` and allow one backend alone.

    Raises:
        NotImplementedError: the backend does not take the inputs.
    """
    try:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
    except RuntimeError as error:
        if "kernel" not in str(error):
            raise
        raise NotImplementedError(f"the backend does not take the inputs: {str(error).splitlines()[0]}") from None


def _peer(backend: SDPBackend) -> Peer:
    dtype = torch.float32 if backend is not SDPBackend.CUDNN_ATTENTION else torch.bfloat16
    return Peer(f"sdpa_kernel({backend.name})", partial(attend, backend=backend), gqa=True, dtype=dtype)


CPU = tuple(_peer(backend) for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION))
CUDA = tuple(
    _peer(backend) for backend in (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
)
