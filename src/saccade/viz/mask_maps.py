"""Maps of masks: the pairs that a mask allows, at any length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from saccade.masks import Mask
from saccade.matrix import AttentionMatrix, Matrix
from saccade.support.errors import value_error
from saccade.support.validation import check_int
from saccade.viz.arrays import Array

_LENGTH = 32  # length of a map if neither the labels nor the mask determine it


def matrix_of_mask(
    mask: Mask,
    q_len: int | None,
    kv_len: int | None,
    x_labels: Sequence[str] | None,
    y_labels: Sequence[str] | None,
) -> Matrix:
    """Return a matrix of uniform attention under a mask; its map shows the pairs that the mask allows.

    Labels determine the lengths. Without labels, a length of None defaults to the length that the mask was constructed
    for, then to the other length, then to 32.
    """
    keys = kv_len if x_labels is None else len(x_labels)
    rows = q_len if y_labels is None else len(y_labels)
    for name, length in (("q_len", rows), ("kv_len", keys)):
        if length is not None:
            check_int(name, length)
    covered = [None if extent is None else extent.stop for extent in mask.domain]
    keys = keys or covered[1] or rows or covered[0] or _LENGTH
    rows = rows or covered[0] or keys
    query, key = (torch.zeros(*mask.shape, length, 1) for length in (rows, keys))
    return AttentionMatrix(query, key, mask)


def refuse_with_mask(**named: object) -> None:
    """Raise an error if a mask is drawn with an option that only applies to weights."""
    for name, value in named.items():
        if value is not None and value is not False:
            raise value_error(name, "be omitted for a mask, which has no weights", value)


def refuse_lengths(**named: int | None) -> None:
    """Raise an error if a length is passed for weights; only masks need lengths."""
    for name, value in named.items():
        if value is not None:
            raise value_error(name, "be omitted for weights, whose shape is known", value)


def visible_cells(cells: Array) -> Array:
    """Return a map with 1 in each cell that contains an allowed pair, and NaN in all other cells."""
    return np.where(np.isnan(cells), np.nan, 1.0)
