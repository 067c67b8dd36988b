"""Attention rollout: the contribution of each input token to queries of the last layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.statistics.statistic import MatrixLike
from saccade.support.errors import unsupported, value_error
from saccade.support.validation import check_int, check_number


def rollout(matrices: Sequence[MatrixLike], queries: Sequence[int], *, residual: float = 0.5) -> Tensor:
    r"""Compute attention rollout: each input token's share in last-layer queries, ``[batch, len(queries), kv_len]``.

    .. math:: r \leftarrow \rho\, r + (1 - \rho)\, \tfrac1H \textstyle\sum_h A_{l,h}^\top r
              \quad \text{from the last layer } l \text{ down to the first}

    Each layer's mean over the heads is mixed with the residual stream. The result consists of rows of the product of
    all layers, computed without forming that product. Rollout ignores values and feed-forward layers and assumes a
    fixed share for the residual, so it is a heuristic, not an attribution.

    Args:
        matrices: one matrix per layer, in order; all are square and have the same shape and dtype.
        queries: indices of queries in the last layer.
        residual: share of the residual stream, from 0 to 1.

    Raises:
        TypeError, ValueError: there are no layers, their shapes or dtypes differ, or an index or ``residual`` is out of
            range.
        UnsupportedError: the rows of a layer are not distributions.

    Cost: one ``A.mT @ r`` per layer; O(batch · heads · len · len(queries)) memory.

    Example:
        >>> from saccade import AttentionMatrix, masks
        >>> x = torch.zeros(1, 2, 3, 4)
        >>> A = AttentionMatrix(x, x, masks.Causal())
        >>> rollout([A, A], [1])
        tensor([[[0.4375, 0.5625, 0.0000]]])

    Reference: Abnar and Zuidema 2020, arXiv:2005.00928, section 3.
    """
    layers = list(matrices)
    if not layers:
        raise value_error("matrices", "contain one for each layer", "none")
    if not 0.0 <= check_number("residual", residual) <= 1.0:
        raise value_error("residual", "be from 0 to 1", residual)
    first = layers[0]
    batch, _, length, _ = first.shape
    for index, layer in enumerate(layers):
        properties = (layer.shape[0], layer.shape[2], layer.shape[3], layer.dtype)
        if properties != (batch, length, length, first.dtype):
            rule = f"all be [{batch}, heads, {length}, {length}] in {first.dtype}, like the first"
            raise value_error("matrices", rule, f"{list(layer.shape)} in {layer.dtype} at layer {index}")
        if not layer.is_stochastic:
            reason = f"the rows of layer {index} do not sum to 1 (is_stochastic is False)"
            raise unsupported("a rollout", [reason])
    chosen = [check_int("each of queries", query, -length, below=length) for query in queries]
    with torch.no_grad():
        rows = torch.zeros(batch, 1, length, len(chosen), dtype=first.dtype, device=first.device)
        for index, query in enumerate(chosen):
            rows[:, :, query, index] = 1.0
        for layer in reversed(layers):
            by_head = layer.rmatmul(rows.expand(-1, layer.shape[1], -1, -1).contiguous())
            rows = residual * rows + (1.0 - residual) * by_head.mean(1, keepdim=True)
    return rows[:, 0].mT.contiguous()
