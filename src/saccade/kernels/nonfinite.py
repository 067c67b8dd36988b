"""NaN and inf in keys and values must not reach a query that may not attend to them.

In a product of matrices 0 * NaN is NaN, so masking the scores alone does not keep them out. Kernels therefore run on
keys and values in which such rows are zeroed, and afterwards mark with NaN the queries that may attend to one. A key
whose score is -inf has weight 0, whatever it holds.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.bias_terms import HidingTerm
from saccade.plan import Strip, Tile
from saccade.score_matrix import ScoreMatrix

__all__ = ["Isolated", "bytes_of_look", "is_finite", "isolate"]

_PAIRS_AT_ONCE = 1 << 22


class Isolated(NamedTuple):
    """Ingredients without non-finite rows, and the queries that may attend to one of those.

    Attributes:
        scores, value: the cleaned ingredients.
        bad_key, bad_value: which rows of key and value those were, bool ``[batch, kv_heads, kv_len]``.
        by_key, by_value: bool ``[batch, heads, q_len]``.
    """

    scores: ScoreMatrix
    value: Tensor
    bad_key: Tensor
    bad_value: Tensor
    by_key: Tensor
    by_value: Tensor

    def mark(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """NaN in the results of the queries concerned; other rows stay as they are."""
        touched = (self.by_key | self.by_value)[..., None]
        return out.masked_fill(touched, math.nan), lse.masked_fill(self.by_key, math.nan)


def is_finite(*tensors: Tensor) -> bool:
    """True if no element is NaN or inf. A sum that overflows counts as not finite: slower, never wrong."""
    for x in tensors:
        tensor = x.detach() if x.requires_grad else x
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        if not math.isfinite((tensor.sum(dtype=torch.float32) if half else tensor.sum()).item()):
            return False
    return True


def bytes_of_look(entries: int, dtype: torch.dtype) -> int:
    """What `is_finite` holds while it looks at a tensor: torch sums half precision by way of a copy in float32."""
    return 4 * entries if dtype in (torch.float16, torch.bfloat16) else 0


def isolate(scores: ScoreMatrix, value: Tensor) -> Isolated | None:
    """Zero the non-finite rows of key and value; None if there are none.

    Cost: O(kv_len * head_dim), and if there are such rows one look at the mask, a few million pairs at a time.
    """
    bad_key, bad_value = (~torch.isfinite(x).all(-1) for x in (scores.key.detach(), value.detach()))
    if not bool(bad_key.any() | bad_value.any()):
        return None
    clean = scores.replaced(scores.query, scores.key.masked_fill(bad_key[..., None], 0))
    # A zeroed key has score 0; -inf in the bias hides it, which is what a score of -inf means.
    hidden = bad_key.repeat_interleave(scores.shape[1] // bad_key.shape[1], 1)
    if bool(bad_key.any()):
        clean.bias = HidingTerm(scores.bias, hidden, scores.query.new_zeros(1, 1, 1, 1))
    clean_value = value.masked_fill(bad_value[..., None], 0)
    return Isolated(clean, clean_value, bad_key, bad_value, _who_sees(scores, bad_key), _who_sees(scores, bad_value))


def _who_sees(scores: ScoreMatrix, bad: Tensor) -> Tensor:
    """Queries with a score above -inf, or NaN, at one of the marked keys (bool ``[batch, kv_heads, kv_len]``)."""
    batch, heads, q_len, _ = scores.shape
    seen = torch.zeros(batch, heads, q_len, dtype=torch.bool, device=scores.device)
    columns = torch.nonzero(bad.any(0).any(0))[:, 0]
    if columns.numel() == 0:
        return seen
    marked = bad[:, :, columns].repeat_interleave(heads // bad.shape[1], 1)[:, :, None]
    spans = _runs(columns.tolist())
    scores = scores.detached()
    height = max(1, _PAIRS_AT_ONCE // (batch * heads * columns.numel()))
    for start in range(0, q_len, height):
        rows = range(start, min(start + height, q_len))
        strips = tuple(Strip(span, ("pairs", rows, span)) for span in spans)
        tile = scores.tile(Tile(slice(0, batch), slice(0, heads), rows, strips, scores.rule))
        seen[:, :, start : rows.stop] = (marked & (tile != -math.inf)).any(-1)
    return seen


def _runs(numbers: list[int]) -> list[range]:
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs
