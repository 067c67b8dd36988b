"""Token positions for a ragged batch that is padded to one length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from saccade.masks import Padding


def padded_positions(
    lengths: Sequence[int] | Tensor, *, side: Literal["right", "left"] = "right", padded_len: int | None = None
) -> Tensor:
    """Return the positions of a ragged batch: 0, 1, 2, … in every item, and -1 for padding.

    Args:
        lengths: number of real tokens in each batch item, at least 0.
        side: the side on which the items are padded.
        padded_len: length to which all items are padded; the length of the longest item when None.

    Returns:
        int64 ``[batch, padded_len]``, suitable as ``positions=`` of an attention layer or cache.

    Raises:
        ValueError: a length is negative or above ``padded_len``, or the side is unknown.

    Example:
        >>> padded_positions([3, 1], side="left")
        tensor([[ 0,  1,  2],
                [-1, -1,  0]])
    """
    checked = Padding(lengths).lengths
    padded_len = max(checked) if padded_len is None else padded_len
    Padding(checked, side="left", padded_len=padded_len)  # checks padded_len
    valid = torch.tensor(checked)[:, None]
    index = torch.arange(padded_len)[None]
    if Padding(checked, side, padded_len).side == "left":
        return (index - (padded_len - valid)).clamp(min=-1)
    return torch.where(index < valid, index, -1)
