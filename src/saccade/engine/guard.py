"""NaN and inf must not pass between a query and a key where the one may not attend to the other.

In a product of matrices 0 * NaN is NaN, so masking the scores alone does not keep them apart. Kernels therefore run on
ingredients in which such rows are zeroed and hidden, and afterwards mark with NaN the queries that are concerned: those
that may attend to such a key or value, and those that hold it themselves and may attend to anything. A pair whose score
is -inf has weight 0, whatever its key and value hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from saccade.engine.bias import HidingTerm
from saccade.engine.grouping import at, groups_of, joined, take
from saccade.engine.ingredients import ScoreMatrix
from saccade.engine.pieces import pieces
from saccade.finite import is_finite, not_finite
from saccade.plan import Strip, Tile

__all__ = ["Isolated", "bytes_of_look", "is_clean", "isolate"]

_PAIRS_AT_ONCE = 1 << 20


class Isolated(NamedTuple):
    """Ingredients without non-finite rows, and the queries whose results are NaN all the same.

    Attributes:
        scores, value: the cleaned ingredients; rows of query and key that were not finite are hidden.
        in_scores: queries with a score that is NaN, or that reach such a key; bool ``[batch, heads, q_len]``.
        in_output: these, and queries that may attend to such a value.
    """

    scores: ScoreMatrix
    value: Tensor
    in_scores: Tensor
    in_output: Tensor

    def mark(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """NaN in the results of the queries concerned; other rows stay as they are."""
        return out.masked_fill(self.in_output[..., None], math.nan), lse.masked_fill(self.in_scores, math.nan)


def is_clean(scores: ScoreMatrix, *tensors: Tensor) -> bool:
    """Whether nothing that is not finite could pass where it must not: nothing is hidden, or all is finite."""
    return scores.plan.is_full or is_finite(*tensors)


def bytes_of_look(entries: int, dtype: torch.dtype) -> int:
    """What `is_finite` holds while it looks at a tensor: torch sums half precision by way of a copy in float32."""
    return 4 * entries if dtype in (torch.float16, torch.bfloat16) else 0


def isolate(scores: ScoreMatrix, value: Tensor, spoilt: Tensor | None = None) -> Isolated | None:
    """Zero and hide the non-finite rows of query, key and value; None if there are none.

    Args:
        scores, value: as they are.
        spoilt: bool ``[batch, heads, q_len]``, queries that are known to have a score of NaN, as a bias may give them.

    Cost: O(len * head_dim), and if there are such rows a look at the pairs of the plan that they have a part in.
    """
    bad_query, bad_key, bad_value = (not_finite(x) for x in (scores.query, scores.key, value))
    bad_query = bad_query if spoilt is None else bad_query | spoilt
    if not bool(bad_query.any() | bad_key.any() | bad_value.any()):
        return None
    query, key = scores.query.masked_fill(bad_query[..., None], 0), scores.key.masked_fill(bad_key[..., None], 0)
    clean = scores.replaced(query, key)
    # A zeroed key has score 0; -inf in the bias hides it, which is what a score of -inf means.
    if bool(bad_query.any() | bad_key.any()):
        hidden = bad_key.repeat_interleave(scores.shape[1] // bad_key.shape[1], 1)
        clean.bias = HidingTerm(scores.bias, bad_query, hidden, scores.query.new_zeros(1, 1, 1, 1))
    by_scores, by_value = _concerned(scores.detached(), bad_query, bad_key, bad_value)
    return Isolated(clean, value.masked_fill(bad_value[..., None], 0), by_scores, by_scores | by_value)


def _concerned(scores: ScoreMatrix, bad_query: Tensor, bad_key: Tensor, bad_value: Tensor) -> tuple[Tensor, Tensor]:
    """Queries with a score above -inf, or NaN, that a bad query or key has a part in; the same for bad values."""
    _, heads, _, _ = scores.shape
    groups = bad_key.shape[1]
    by_scores, by_value = torch.zeros_like(bad_query), torch.zeros_like(bad_query)
    bad_columns = (bad_key | bad_value).any(0).any(0).numpy(force=True)
    for tile in scores.row_plan.tiles:
        is_own = bool(at(bad_query[tile.batch, tile.heads], tile.rows, 2).any())
        columns = tile.columns if is_own else tuple(_picked(tile, bad_columns))
        if not columns:
            continue
        cut = tile._replace(columns=columns)
        for piece in pieces(cut, share=heads // groups, rows=cut.height, entries=_PAIRS_AT_ONCE):
            seen = scores.tile(piece) != -math.inf
            of_group = (piece.batch, groups_of(piece.heads, heads, groups))
            spans = joined(tuple(strip.keys for strip in piece.columns))
            share = seen.shape[1] // (of_group[1].stop - of_group[1].start)
            key, value = (
                take(x[of_group], spans, 2).repeat_interleave(share, 1)[:, :, None] for x in (bad_key, bad_value)
            )
            query = at(bad_query[piece.batch, piece.heads], piece.rows, 2)
            for total, touched in (
                (by_scores, (seen & key).any(-1) | (seen.any(-1) & query)),
                (by_value, (seen & value).any(-1)),
            ):
                at(total[piece.batch, piece.heads], piece.rows, 2).logical_or_(touched)
    return by_scores, by_value


def _picked(tile: Tile, marked: np.ndarray) -> Iterator[Strip]:
    """The columns of a tile that are marked (bool ``[kv_len]``), as strips."""
    for strip in tile.columns:
        keys = strip.keys
        places = np.flatnonzero(marked[keys.start : keys.stop : keys.step])
        for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(places) else ():
            span = keys[int(run[0]) : int(run[-1]) + 1]
            yield Strip(span, True if strip.residual is True else ("pairs", tile.rows, span))
