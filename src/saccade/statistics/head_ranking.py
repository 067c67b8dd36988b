"""Rank heads by a statistic, and compute two measures of the information in a head's attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.statistics.received import PositionInformation
from saccade.statistics.statistic import compute_from_weights
from saccade.support.numerics import widest_dtype


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


def position_information(weights: Tensor) -> Tensor:
    """Compute `PositionInformation` of dense weights; rows are scaled to sum to 1 first.

    Args:
        weights: ``[..., q_len, kv_len]``, nonnegative.

    Returns:
        float64 ``[...]``, in nats.
    """
    rows = _distributions(weights)
    heads = rows.reshape(-1, 1, *rows.shape[-2:])
    information: Tensor = compute_from_weights(heads, PositionInformation())[0]
    return information.reshape(rows.shape[:-2])


def unexplained_information(weights: Tensor) -> Tensor:
    r"""Compute the information in a head's attention that key popularity and distance do not explain, in nats.

    .. math:: I = s \cdot \frac1n \sum_i \mathrm{KL}(a_i \,\|\, e_i), \qquad e_{ij} \propto m_j\, o_{j-i}

    where m is the mean row and o the mean weight at each distance, after rows are scaled to sum to 1, and s is the mean
    sum of a row before scaling. The result is 0 for a sink and for a head that attends to the previous token. Rows of
    zeros do not count in the mean of the divergences.

    Args:
        weights: ``[..., q_len, kv_len]``, nonnegative; a row that lacks part of its attention sums to less than 1.

    Returns:
        float64 ``[...]``.

    Example:
        >>> previous = torch.eye(4).roll(-1, 1).tril()
        >>> unexplained_information(previous).item()
        0.0
    """
    rows = _distributions(weights)
    q_len, kv_len = rows.shape[-2:]
    queries, keys = (torch.arange(length, device=rows.device) for length in (q_len, kv_len))
    distance = keys - queries[:, None] + q_len - 1  # [q_len, kv_len], from 0
    pairs = torch.bincount(distance.flatten())
    at_distance = rows.new_zeros(*rows.shape[:-2], len(pairs)).index_add_(-1, distance.flatten(), rows.flatten(-2))
    expected = rows.sum(-2, keepdim=True) * (at_distance / pairs)[..., distance]
    expected = expected / expected.sum(-1, keepdim=True)
    surprise = torch.where(rows > 0, rows * (rows / expected).log(), 0.0)
    count = (rows.sum(-1) > 0).sum(-1).clamp(min=1)
    share = weights.to(widest_dtype(weights.device)).sum(-1).mean(-1)
    return (share * surprise.sum((-2, -1)) / count).clamp(min=0)


def _distributions(weights: Tensor) -> Tensor:
    """Scale rows of attention weights to sum to 1; empty rows stay 0."""
    weights = weights.to(widest_dtype(weights.device))
    mass = weights.sum(-1, keepdim=True)
    return torch.where(mass > 0, weights / mass, 0.0)
