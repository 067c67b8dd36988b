"""A correct attention kernel in plain PyTorch, from which wrong kernels are derived, and the type of kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float | None = None, fill: float = -torch.inf
) -> Tensor:
    """Compute attention correctly. Masked pairs get the score ``fill``."""
    wide = torch.promote_types(query.dtype, torch.float32)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1).to(wide) for x in (key, value))
    some = mask.any(-1, keepdim=True)
    scores = query.to(wide) @ key.mT * (query.shape[3] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~(mask | ~some), fill).softmax(-1)
    return (weights.masked_fill(~some, 0.0) @ value).to(query.dtype)
