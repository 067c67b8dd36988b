"""Rank heads by a statistic."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Head(NamedTuple):
    """An attention head in a ranking.

    Attributes:
        layer, head: indices, from 0.
        value: the value by which heads are ranked.
    """

    layer: int
    head: int
    value: float


def rank_heads(values: Tensor, *, layer: int | None = None, head: int | None = None) -> list[Head]:
    """Rank all heads by their values, largest first; ties are sorted by layer, then head.

    Args:
        values: ``[layers, heads]``, such as one batch item of `saccade.recording.Recording.by_head`.
        layer: if given, rank only the heads of this layer.
        head: if given, rank only this head of every layer.

    Example:
        >>> rank_heads(torch.tensor([[0.5, 2.0], [1.0, 0.0]]))[0]
        Head(layer=0, head=1, value=2.0)
    """
    heads = [
        Head(own_layer, own_head, value)
        for own_layer, row in enumerate(values.tolist())
        for own_head, value in enumerate(row)
        if layer in (None, own_layer) and head in (None, own_head)
    ]
    return sorted(heads, key=lambda entry: -entry.value)
