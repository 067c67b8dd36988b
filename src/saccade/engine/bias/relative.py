"""Relative biases, which depend on the distance between query and key and are stored as one value per distance.

Axis legend: batch B · heads H · q_len L · kv_len S · rows R · columns C · distances T.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.engine.bias.term import Term, entry, rows_of, summed_to
from saccade.engine.positions.positioned_mask import PositionedMask
from saccade.engine.tiles.index_ranges import take
from saccade.masks import Mask
from saccade.plan import Tile
from saccade.positions import Bias
from saccade.support.errors import value_error
from saccade.support.numerics import wide_dtype
from saccade.support.torch_modes import without_autocast


class DistanceTerm(Term):
    """A relative bias: a table of values, indexed by the distance between query and key.

    Args:
        source: ``[B | 1, H | 1, L | 1, T]``: the bias at distances ``lowest``, ``lowest + 1``, …. Distances outside of
            the table use its first or last value.
        lowest: the smallest distance in the table.
        first: the distance between query 0 and key 0, if the positions of queries and keys are consecutive.
        q_addresses, kv_addresses: if the positions are not consecutive, int64 ``[B | 1, L]`` and ``[B | 1, S]``. Their
            differences are the distances.
    """

    is_materialised = False

    def __init__(
        self,
        source: Tensor,
        lowest: int,
        first: int,
        q_addresses: Tensor | None = None,
        kv_addresses: Tensor | None = None,
    ):
        self.source, self.lowest, self.first = source, lowest, first
        self.q_addresses, self.kv_addresses = q_addresses, kv_addresses

    def of(self, source: Tensor) -> DistanceTerm:
        return DistanceTerm(source, self.lowest, self.first, self.q_addresses, self.kv_addresses)

    def permuted(self, rows: Tensor, kv_len: int) -> DistanceTerm:
        source = self.source.index_select(2, rows) if self.source.shape[2] > 1 else self.source
        if self.q_addresses is None or self.kv_addresses is None:
            q, kv = (rows + self.first)[None], torch.arange(kv_len, device=rows.device)[None]
        else:
            q, kv = self.q_addresses.index_select(1, rows), self.kv_addresses
        return DistanceTerm(source, self.lowest, 0, q, kv)

    def read(self, tile: Tile) -> Tensor:
        table = rows_of(self.source, tile)
        if self._is_toeplitz(tile):
            parts = []
            for span in tile.spans:
                runs = table[:, :, 0].index_select(-1, self._run(tile.rows, span))
                # Row r is a segment of the reversed run, shifted by r. Flipping the rows instead would leave their
                # entries non-contiguous, and kernels that read row by row would copy them first.
                backwards = torch.arange(tile.height - 1, -1, -1, device=self.source.device)
                parts.append(runs.flip(-1).unfold(-1, len(span), 1).index_select(-2, backwards))
            return parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        index = self._index(tile)
        if table.shape[2] != 1:
            sizes = torch.broadcast_shapes(table.shape[:2], index.shape[:2])
            return table.expand(*sizes, -1, -1).gather(3, index.expand(*sizes, -1, -1))
        if len(index) == 1:
            return table[:, :, 0][:, :, index[0, 0]]
        sizes = (len(index), table.shape[1], *index.shape[2:])
        wide = table[:, :, 0].expand(len(index), -1, -1)
        return wide.gather(2, index.expand(-1, table.shape[1], -1, -1).flatten(2)).view(sizes)

    def at(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        if self.q_addresses is None or self.kv_addresses is None:
            distance = q - kv + self.first
        else:
            zeros = b - b
            q_address, kv_address = (
                x[b if len(x) > 1 else zeros, i] for x, i in ((self.q_addresses, q), (self.kv_addresses, kv))
            )
            distance = q_address - kv_address
        return entry(self.source, b, h, q, (distance - self.lowest).clamp(0, self.source.shape[3] - 1))

    def accumulate_gradient(self, grad: Tensor, tile: Tile, grad_scores: Tensor) -> None:
        table = rows_of(grad, tile)
        addresses = (self.q_addresses, self.kv_addresses)
        if all(x is None or len(x) == 1 for x in addresses):
            grad_scores = summed_to(grad_scores, table)  # items with equal positions read the same entries
        if self._is_toeplitz(tile):
            start = 0
            for span in tile.spans:
                part = grad_scores[..., start : start + len(span)]
                table[:, :, 0].index_add_(-1, self._run(tile.rows, span), _diagonal_sums(part))
                start += len(span)
            return
        index = self._index(tile)
        if table.shape[2] != 1:
            sizes = grad_scores.shape
            added = torch.zeros(*sizes[:3], table.shape[3], dtype=table.dtype, device=table.device)
            added.scatter_add_(3, index.expand(sizes), grad_scores)
            table += summed_to(added, table)
            return
        index = index.expand(len(grad_scores), 1, *grad_scores.shape[2:]).flatten(2)
        index = index.expand(-1, grad_scores.shape[1], -1)
        added = torch.zeros(*grad_scores.shape[:2], table.shape[3], dtype=table.dtype, device=table.device)
        added.scatter_add_(2, index, grad_scores.flatten(2))
        table += summed_to(added[:, :, None], table)

    def _is_toeplitz(self, tile: Tile) -> bool:
        steps = {tile.rows.step, *(span.step for span in tile.spans)}
        is_alike = self.q_addresses is None and self.source.shape[2] == 1 and len(steps) == 1
        return is_alike and tile.height > 0 and tile.width > 0

    def _run(self, rows: range, span: range) -> Tensor:
        """Return the bias-table index of each diagonal of a tile, starting at the last column of the first row."""
        step, length = rows.step, len(rows) + len(span) - 1
        start = self.first + rows.start - span[-1]
        index = torch.arange(length, device=self.source.device) * step + (start - self.lowest)
        return index.clamp_(0, self.source.shape[3] - 1)

    def _index(self, tile: Tile) -> Tensor:
        """Return the bias-table index of each query-key pair in a tile, int64 ``[B | 1, 1, R, C]``."""
        q, kv = self.q_addresses, self.kv_addresses
        if q is None or kv is None:
            columns = torch.cat([torch.arange(s.start, s.stop, s.step, device=self.source.device) for s in tile.spans])
            rows = torch.arange(tile.rows.start, tile.rows.stop, tile.rows.step, device=self.source.device)
            distances = (rows[:, None] - columns + self.first)[None]
        else:
            q = take(q[tile.batch] if len(q) > 1 else q, (tile.rows,), 1)
            kv = take(kv[tile.batch] if len(kv) > 1 else kv, tile.spans, 1)
            distances = q[:, :, None] - kv[:, None]
        return (distances - self.lowest).clamp_(0, self.source.shape[3] - 1)[:, None]


def _diagonal_sums(x: Tensor) -> Tensor:
    """Sum a bias gradient along its diagonals, ``[..., R, C] -> [..., R + C - 1]``, ordered by row minus column."""
    rows, columns = x.shape[-2:]
    # Pad each row with zeros and cut the result into rows that are one shorter. This shifts each row one column
    # further to the right than the row above.
    skewed = F.pad(x.flip(-1), (0, rows)).flatten(-2)[..., : rows * (rows + columns - 1)]
    return skewed.unflatten(-1, (rows, rows + columns - 1)).sum(-2)


def distance_term(
    bias: Bias,
    query: Tensor,
    shape: tuple[int, int, int, int],
    rule: Mask,
    origin: tuple[int, int],
    scale: float,
) -> DistanceTerm:
    """Convert a relative bias to a table of its values at all distances that occur in a matrix."""
    _, heads, q_len, kv_len = shape
    q, kv = _addresses(bias, shape, rule, origin, query.device)
    if q is None or kv is None:
        first = origin[0] - origin[1]
        lowest, highest = first - (kv_len - 1), first + q_len - 1
    elif q.numel() and kv.numel():
        first, lowest, highest = 0, int(q.min() - kv.max()), int(q.max() - kv.min())
    else:
        first, lowest, highest = 0, 0, 0
    if bias.reach is not None:
        lowest, highest = (min(max(end, -bias.reach), bias.reach) for end in (lowest, highest))
    distances = torch.arange(lowest, max(lowest, highest) + 1, device=query.device)
    with without_autocast(query.device):
        table = bias.values(distances, query, scale)
    if table.dim() != 4 or any(
        table_size not in (1, size) for table_size, size in zip(table.shape, shape[:3], strict=False)
    ):
        name = type(bias).__name__
        got = f"{name} for {table.shape[1]} heads" if table.dim() == 4 else name
        raise value_error("bias", f"be made for {heads} heads, or one", got)
    # Use the dtype of the scores: float64 for float64 inputs, float32 for all others.
    return DistanceTerm(table.to(wide_dtype(query.dtype)), lowest, first, q, kv)


def _addresses(
    bias: Bias, shape: tuple[int, int, int, int], rule: Mask, origin: tuple[int, int], device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return the addresses of queries and keys, int64 ``[batch | 1, len]``, whose differences are the distances.

    Both are None if the addresses are consecutive positions.
    """
    if isinstance(rule, PositionedMask):
        return bias.address(rule.q_positions), bias.address(rule.kv_positions)
    q, kv = (
        torch.arange(first, first + length, device=device)[None]
        for first, length in zip(origin, shape[2:], strict=True)
    )
    # With more queries than keys, the first queries are before position 0, where `address` is not defined.
    begun = q[:, max(0, -origin[0]) :]
    if bias.address(begun) is begun:
        return None, None
    return bias.address(q), bias.address(kv)
