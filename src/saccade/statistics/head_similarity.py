"""Pairwise distances between the attention matrices of a layer's heads."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from saccade.statistics.statistic import MatrixInfo, MatrixLike
from saccade.support.errors import unsupported
from saccade.support.validation import check_choice

Between = Literal["jensen_shannon", "total_variation", "frobenius"]
_ENTRIES = 1 << 20  # maximum number of weights in memory at a time, over all heads


def head_distances(matrix: MatrixLike, between: Between = "jensen_shannon") -> Tensor:
    r"""Compute the distance between each pair of heads of a batch item, ``[batch, heads, heads]``.

    - "jensen_shannon": mean over the queries of the Jensen-Shannon divergence of the two rows, in nats, 0 to log 2.
    - "total_variation": mean over the queries of half the sum of absolute differences, 0 to 1.
    - "frobenius": :math:`\|A_h - A_g\|_F` over all queries. It is the cheapest, and rows need not be distributions.

    The means are over the queries that attend to any key in at least one of the two heads.

    Args:
        matrix: an attention matrix from any mechanism.
        between: the kind of distance.

    Raises:
        ValueError: ``between`` is unknown.
        UnsupportedError: rows are not distributions, which the first two distances require.

    Cost: O(heads² · q_len · kv_len) time ("frobenius": the cost of a matrix product), in chunks of a few megabytes.

    Example:
        >>> from saccade import AttentionMatrix
        >>> q = torch.tensor([[0.0], [50.0]])[None, :, None]
        >>> A = AttentionMatrix(q, torch.tensor([[0.0], [1.0]]).expand(1, 2, 2, 1))
        >>> head_distances(A, "total_variation")[0, 0]
        tensor([0.0000, 0.5000])

    Reference: Clark et al. 2019, arXiv:1906.04341, section 6.
    """
    check_choice("between", between, get_args(Between))
    if between != "frobenius" and not matrix.is_stochastic:
        reason = f"the rows of this {type(matrix).__name__} do not sum to 1 (is_stochastic is False)"
        raise unsupported(between, [reason], hint='"frobenius" does not need distributions')
    batch, heads, q_len, kv_len = matrix.shape
    info = MatrixInfo.of(matrix)
    sums = torch.zeros(batch, heads, heads, dtype=info.sum_dtype, device=matrix.device)
    count = torch.zeros_like(sums)
    height = max(1, _ENTRIES // max(1, heads * kv_len))
    with torch.no_grad():
        for item in range(batch):
            for start in range(0, q_len, height):
                rows = range(start, min(q_len, start + height))
                if heads and kv_len:
                    _add(sums[item], count[item], _dense(matrix, item, rows), between)
    answer = sums.clamp_min(0.0).sqrt() if between == "frobenius" else sums / count.clamp_min(1.0)
    return answer.to(info.dtype)


def _dense(matrix: MatrixLike, item: int, rows: range) -> Tensor:
    """Return the dense weights of the given rows in all heads of a batch item, ``[heads, rows, kv_len]``."""
    _, heads, _, kv_len = matrix.shape
    dense = torch.zeros(heads, len(rows), kv_len, dtype=MatrixInfo.of(matrix).dtype, device=matrix.device)
    for block in matrix.blocks(batch=item, rows=rows):
        head_index = torch.arange(block.heads.start, block.heads.stop, device=dense.device)
        dense[head_index[:, None, None], block.queries[:, None] - rows.start, block.keys] = block.weights[0]
    return dense


def _add(sums: Tensor, count: Tensor, rows: Tensor, between: Between) -> None:
    if between == "frobenius":
        for head, head_rows in enumerate(rows):
            sums[head] += (rows - head_rows).square_().sum((-1, -2), dtype=sums.dtype)
        return
    is_nonempty = rows.sum(-1) != 0
    entropies = torch.special.entr(rows).sum(-1)
    for head, head_rows in enumerate(rows):
        if between == "total_variation":
            distance = 0.5 * (rows - head_rows).abs_().sum(-1)
        else:
            distance = torch.special.entr(0.5 * (rows + head_rows)).sum(-1) - 0.5 * (entropies + entropies[head])
        # If one of the two rows is empty, their mean is not a distribution, so clamp the divergence at 0.
        either = is_nonempty | is_nonempty[head]
        sums[head] += torch.where(either, distance.clamp_min(0.0), 0.0).sum(-1, dtype=sums.dtype)
        count[head] += either.sum(-1)
