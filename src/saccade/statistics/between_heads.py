"""How alike the heads of a layer are: by name, because pairs of heads cost more than heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol

import torch
from torch import Tensor

from saccade.errors import unsupported, value_error
from saccade.statistics.block import Block

__all__ = ["Between", "head_distances"]

Between = Literal["jensen_shannon", "total_variation", "frobenius"]
_ENTRIES = 1 << 20  # weights of all heads together that are held at a time


class Headed(Protocol):
    """What is needed of a `saccade.Matrix`."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, heads, q_len, kv_len)."""
        ...

    @property
    def is_stochastic(self) -> bool:
        """Whether rows are distributions."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the ingredients are."""
        ...

    def blocks(self, batch: int | None = None, head: int | None = None, rows: range | None = None) -> Iterator[Block]:
        """Complete rows."""
        ...


def head_distances(matrix: Headed, between: Between = "jensen_shannon") -> Tensor:
    r"""Distance of every two heads of each batch item, ``[batch, heads, heads]``: small where they do the same.

    - "jensen_shannon": mean over the queries of the Jensen-Shannon divergence of the two rows, in nats, 0 to log 2.
    - "total_variation": mean over the queries of half the sum of absolute differences, 0 to 1.
    - "frobenius": :math:`\|A_h - A_g\|_F`, over all queries together; the cheapest, for rows that need be no
      distributions.

    Means are over queries that attend to something in either head.

    Args:
        matrix: of any mechanism.
        between: which distance.

    Raises:
        ValueError: ``between`` is none of the three.
        UnsupportedError: rows that are not distributions, for the first two.

    Cost: O(heads² · q_len · kv_len) time ("frobenius": as a product), in pieces of a few megabytes.

    Example:
        >>> from saccade import AttentionMatrix
        >>> q = torch.tensor([[0.0], [50.0]])[None, :, None]
        >>> A = AttentionMatrix(q, torch.tensor([[0.0], [1.0]]).expand(1, 2, 2, 1))
        >>> head_distances(A, "total_variation")[0, 0]
        tensor([0.0000, 0.5000])

    Reference: Clark et al. 2019, arXiv:1906.04341, section 6.
    """
    if between not in ("jensen_shannon", "total_variation", "frobenius"):
        rule = 'be "jensen_shannon", "total_variation" or "frobenius"'
        raise value_error("head_distances", "between", rule, repr(between))
    if between != "frobenius" and not matrix.is_stochastic:
        reason = f"the rows of this {type(matrix).__name__} do not sum to 1 (is_stochastic is False)"
        raise unsupported("head_distances", between, [reason], hint='"frobenius" needs no distributions')
    batch, heads, q_len, kv_len = matrix.shape
    sums = torch.zeros(batch, heads, heads, dtype=torch.float64, device=matrix.device)
    count = torch.zeros_like(sums)
    height = max(1, _ENTRIES // max(1, heads * kv_len))
    with torch.no_grad():
        for item in range(batch):
            for start in range(0, q_len, height):
                rows = range(start, min(q_len, start + height))
                if heads and kv_len:
                    _add(sums[item], count[item], _dense(matrix, item, rows), between)
    if between == "frobenius":
        return sums.clamp_min_(0.0).sqrt().float() if not _is_double(matrix) else sums.clamp_min_(0.0).sqrt()
    mean = sums / count.clamp_min(1.0)
    return mean if _is_double(matrix) else mean.float()


def _is_double(matrix: Headed) -> bool:
    return getattr(matrix, "dtype", None) == torch.float64


def _dense(matrix: Headed, item: int, rows: range) -> Tensor:
    """Some rows of all heads of one batch item, ``[heads, rows, kv_len]``."""
    _, heads, _, kv_len = matrix.shape
    dense: Tensor | None = None
    for block in matrix.blocks(batch=item, rows=rows):
        if dense is None:
            dense = block.weights.new_zeros(heads, len(rows), kv_len)
        places = torch.arange(block.rows.start, block.rows.stop, block.rows.step, device=dense.device) - rows.start
        own = torch.arange(block.heads.start, block.heads.stop, device=dense.device)
        dense[own[:, None, None], places[:, None], block.keys] = block.weights[0]
    return torch.zeros(heads, len(rows), kv_len, device=matrix.device) if dense is None else dense


def _add(sums: Tensor, count: Tensor, rows: Tensor, between: Between) -> None:
    if between == "frobenius":
        for head, own in enumerate(rows):
            sums[head] += (rows - own).square_().sum((-1, -2), dtype=sums.dtype)
        return
    seeing = rows.sum(-1) != 0
    entropies = torch.special.entr(rows).sum(-1)
    for head, own in enumerate(rows):
        if between == "total_variation":
            distance = 0.5 * (rows - own).abs_().sum(-1)
        else:
            distance = torch.special.entr(0.5 * (rows + own)).sum(-1) - 0.5 * (entropies + entropies[head])
        # A pair whose other head sees nothing has no distance: its mean row is no distribution.
        either = seeing | seeing[head]
        sums[head] += torch.where(either, distance.clamp_min(0.0), 0.0).sum(-1, dtype=sums.dtype)
        count[head] += either.sum(-1)
