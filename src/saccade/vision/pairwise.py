"""Sums over all pairs that need no matrix of pairs."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dot_mean", "rectified_sum_mean"]


def dot_mean(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    r"""The mean over keys j of :math:`(q_i^\top k_j)\, v_j`.

    A product of three matrices may be bracketed from the right, :math:`Q (K^\top V)`, which is linear in the number
    of queries and keys. A softmax between the first two would forbid that.

    Args:
        query: ``[batch, q_len, head_dim]``.
        key: ``[batch, kv_len, head_dim]``.
        value: ``[batch, kv_len, value_dim]``.

    Returns:
        ``[batch, q_len, value_dim]``.

    Cost: O(batch · (q_len + kv_len) · head_dim · value_dim).
    """
    return query @ (key.mT @ (value / key.shape[1]))


def rectified_sum_mean(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    r"""The mean over keys j of :math:`\mathrm{ReLU}(a_i + b_j)\, v_j`, for one number a per query and b per key.

    Sorted by b, the keys that a query does not rectify away are the first ones, and the sum over them is
    :math:`a_i \sum_j v_j + \sum_j b_j v_j`: two running sums, read at one place. No pair is ever looked at. The running
    sums are float64, because the two terms cancel where a and b have opposite signs.

    Args:
        query: a, ``[batch, q_len]``.
        key: b, ``[batch, kv_len]``.
        value: ``[batch, kv_len, value_dim]``.

    Returns:
        ``[batch, q_len, value_dim]`` in the value's dtype.

    Cost: O(batch · (q_len + kv_len) · (value_dim + log kv_len)) time, O(batch · (q_len + kv_len) · value_dim) memory.
    """
    a, b, v = query.double(), key.double(), value.double() / key.shape[1]
    b, order = b.sort(dim=1)
    v = v.gather(1, order[:, :, None].expand_as(v))
    # From the largest b down; entry n is the sum of the n largest, so that none is a place too.
    running = torch.cat([v, b[:, :, None] * v], 2).flip(1).cumsum(1)
    running = torch.cat([torch.zeros_like(running[:, :1]), running], 1)
    kept = b.shape[1] - torch.searchsorted(b.detach(), -a.detach(), right=True)
    sums = running.gather(1, kept[:, :, None].expand(-1, -1, running.shape[2]))
    of_values, of_weighted = sums.chunk(2, 2)
    return (a[:, :, None] * of_values + of_weighted).to(value.dtype)
