"""Grouped-query attention: products in which several query heads share a key head, without expanding the keys.

Head h reads key head ``h // (heads // kv_heads)``. The heads of a group are adjacent, so they are folded into the rows.
Axis legend: batch B · heads H · kv_heads G · rows R · columns C · width D.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply each query head by its key head, ``left [B, H, R, C] @ right [B, G, C, D] -> [B, H, R, D]``."""
    return grouped(torch.matmul, left, right)


def grouped(function: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor) -> Tensor:
    """Return ``function(left, right)``, called with the query heads of each group in ``left`` folded into the rows."""
    if left.shape[1] == right.shape[1]:
        return function(left, right)
    out = function(folded(left, right.shape[1]), right)
    return out.reshape(*left.shape[:3], out.shape[3])


def transposed_product(left: Tensor, right: Tensor, groups: int) -> Tensor:
    """Compute ``left.mT [B, H, C, R] @ right [B, H, R, D] -> [B, G, C, D]``, summed over the heads of each group."""
    return folded(left, groups).mT @ folded(right, groups)


def folded(x: Tensor, groups: int) -> Tensor:
    """Fold the query heads of each group into the rows, ``[B, H, R, D] -> [B, G, H // G * R, D]``."""
    batch, heads, rows, width = x.shape
    return x if heads == groups else x.reshape(batch, groups, heads // groups * rows, width)


def groups_of(heads: slice, num_heads: int, num_kv_heads: int) -> slice:
    """Return the slice of key heads for a slice of query heads, which must be a single head or whole groups."""
    if num_kv_heads == 0:
        return slice(0, 0)
    share = num_heads // num_kv_heads
    return slice(heads.start // share, (heads.stop - 1) // share + 1)
