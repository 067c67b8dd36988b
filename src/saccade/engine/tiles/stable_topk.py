"""strongest: the largest of each row, and of equal ones those that stand first."""

from __future__ import annotations

import math

from torch import Tensor

__all__ = ["strongest"]


def strongest(scores: Tensor, k: int) -> Tensor:
    """Where the ``k`` largest of each row are, int64 ``[..., k]``; of equal ones those that stand first.

    Whatever follows in a row does not change which of two equal ones is taken, as it may with ``topk``. NaN is largest.

    Cost: ``topk``, and one pass to look for ties; only rows that have one at the last place are done again.
    """
    found = scores.topk(k, -1, sorted=False)
    if k == 0:
        return found.indices
    is_nan = found.values.isnan()
    least = found.values.masked_fill(is_nan, math.inf).amin(-1, keepdim=True)
    tied = (scores == least).sum(-1) > (found.values == least).sum(-1)
    tied &= (least[..., 0] > -math.inf) & ~is_nan.all(-1)
    if bool(tied.any()):
        rows, low = scores[tied], least[tied]
        above, equal = (rows > low) | rows.isnan(), rows == low
        missing = k - above.sum(-1, keepdim=True)
        taken = above | (equal & (equal.cumsum(-1) <= missing))
        found.indices[tied] = taken.nonzero()[:, 1].view(-1, k)
    return found.indices
