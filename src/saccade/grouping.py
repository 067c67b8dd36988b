"""Products in which several query heads share one group of keys, without expanding the keys.

Head h reads group ``h // (heads // kv_heads)``: the heads of one group are neighbours, so they fold into the rows.
Axis legend: batch B · heads H · kv_heads G · rows R · columns C · width D.
"""

import torch
from torch import Tensor

from saccade.plan import Ranges

__all__ = ["at", "groups_of", "product", "take"]


def product(left: Tensor, right: Tensor) -> Tensor:
    """``left [B, H, R, C] @ right [B, G, C, D] -> [B, H, R, D]``, each head with its group."""
    batch, heads, rows, columns = left.shape
    groups = right.shape[1]
    if heads == groups:
        return left @ right
    folded = left.reshape(batch, groups, heads // groups * rows, columns)
    return (folded @ right).reshape(batch, heads, rows, right.shape[3])


def groups_of(heads: slice, num_heads: int, num_kv_heads: int) -> slice:
    """The groups that a slice of heads reads; the slice holds one head, or whole groups."""
    if num_kv_heads == 0:
        return slice(0, 0)
    share = num_heads // num_kv_heads
    return slice(heads.start // share, (heads.stop - 1) // share + 1)


def at(x: Tensor, span: range, dim: int) -> Tensor:
    """The part of ``x`` at one range along ``dim``, as a view."""
    if span.step == 1:
        return x.narrow(dim, span.start, len(span))
    return x[(slice(None),) * dim + (slice(span.start, span.stop, span.step),)]


def take(x: Tensor, ranges: Ranges, dim: int) -> Tensor:
    """The part of ``x`` at ``ranges`` along ``dim``: a view if there is one range, else a copy."""
    parts = [at(x, span, dim) for span in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
