"""Block: complete rows of a matrix, which is all that a statistic ever sees of it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from saccade.plan import Ranges

__all__ = ["Block", "as_slice"]


class Block(NamedTuple):
    """Complete rows of a matrix, with the columns in which they can be other than 0.

    Attributes:
        batch, heads: slices of batch items and heads; the heads are one head, or whole groups that share keys.
        rows: indices of queries.
        columns: indices of keys, as ranges; the columns in none of them are 0 in these rows.
        weights: ``[batch, heads, rows, columns]``, float32 or wider.
        log_weights: natural log of the weights where a mechanism has it anyway, finite even where a weight is 0;
            None otherwise. What is close to 0 or 1 keeps its precision here.
    """

    batch: slice
    heads: slice
    rows: range
    columns: Ranges
    weights: Tensor
    log_weights: Tensor | None = None


def as_slice(span: range) -> slice:
    """The slice that picks the indices of a range out of a dimension."""
    return slice(span.start, span.stop, span.step)
