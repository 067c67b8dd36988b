"""Decay biases. The bias of a pair is the sum of the log decays of all tokens after the key, up to the query.

Axis legend: batch B · heads H · q_len L · kv_len S · rows R · columns C.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.engine.bias.term import Term, entry, summed_to
from saccade.engine.tiles.index_ranges import add_at, at, take
from saccade.plan import Tile
from saccade.support.torch_modes import has_values, is_mapped

_NARROW_RANGE = 128.0
"""Largest range of cumulative sums that may be stored in float32. Centred at 0, each sum has an error below 4e-6."""


class DecayTerm(Term):
    """A decay bias: the cumulative sum of log decays at the query minus the cumulative sum at the key.

    Args:
        source: float64 ``[B, H, 1, S]``, cumulative sums of the log decays up to and including each key. Only their
            differences are rounded to the dtype of the scores, because the sums grow with the length.
        last: int64 ``[B | 1, L]``: for each query, the last key whose decay is included.
        dtype: dtype of the scores.
    """

    is_materialised = False

    def __init__(self, source: Tensor, last: Tensor, dtype: torch.dtype):
        self.source, self.last, self.dtype = source, last, dtype

    def of(self, source: Tensor) -> DecayTerm:
        # Indices on the meta device cannot be combined with real tensors, even if only shapes matter.
        last = torch.zeros_like(self.last, device=source.device) if self.last.is_meta else self.last
        return DecayTerm(source, last, self.dtype)

    def permuted(self, rows: Tensor, kv_len: int) -> DecayTerm:
        return DecayTerm(self.source, self.last.index_select(1, rows), self.dtype)

    def read(self, tile: Tile) -> Tensor:
        source = self.source[tile.batch, tile.heads, 0]
        rows = source.gather(2, self._last(tile).expand(*source.shape[:2], -1))
        return (rows[..., None] - take(source, tile.spans, 2)[:, :, None]).to(self.dtype)

    def at(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        last = self.last[b if len(self.last) > 1 else b - b, q]
        up_to_query, up_to_key = (entry(self.source, b, h, q - q, place) for place in (last, kv))
        return (up_to_query - up_to_key).to(self.dtype)

    def accumulate_gradient(self, grad: Tensor, tile: Tile, grad_scores: Tensor) -> None:
        total = grad[tile.batch, tile.heads, 0]
        grad_scores = summed_to(grad_scores, total).to(grad.dtype)
        last = self._last(tile).expand(*total.shape[:2], -1)
        total.scatter_add_(2, last, grad_scores.sum(3))
        add_at(total, -grad_scores.sum(2), tile.spans, 2)

    def of_keys(self) -> Tensor:
        """Return the part of the decay bias that depends on the key, float32 ``[B, H, 1, S]``."""
        return (self._middle - self.source.detach()).float()

    def of_rows(self) -> Tensor:
        """Return the part of the decay bias that depends on the query, float64 ``[B, H, L]``."""
        source = self.source.detach()
        rows = source[:, :, 0].gather(2, self.last[:, None].expand(*source.shape[:2], -1))
        return rows - self._middle[..., 0]

    def has_narrow_range(self) -> bool:
        """Return whether the cumulative sums span so small a range that `of_keys` is as accurate as the scores.

        Without values, as in a dry run, the range is assumed to be narrow. The values that `vmap` maps cannot be read,
        and their range is assumed to be wide.
        """
        source = self.source.detach()
        if is_mapped(source):
            return False
        return not (has_values(source) and source.numel()) or bool(
            (source.amax(3) - source.amin(3)).max() <= _NARROW_RANGE
        )

    def of_gradients(self, grad_keys: Tensor, grad_rows: Tensor | None) -> Tensor:
        """Return the gradient of `source`, given the gradients of `of_keys` and `of_rows`.

        Args:
            grad_keys: ``[B, H, 1, S]``.
            grad_rows: ``[B, H, L]``; None for 0.
        """
        grad = -grad_keys.to(self.source.dtype)
        if grad_rows is not None:
            last = self.last[:, None].expand(*grad.shape[:2], -1)
            grad[:, :, 0].scatter_add_(2, last, grad_rows.to(grad.dtype))
        return grad

    @property
    def _middle(self) -> Tensor:
        """Midpoint between the largest and the smallest cumulative sum of each head, ``[B, H, 1, 1]``."""
        source = self.source.detach()
        return (source.amax(3, keepdim=True) + source.amin(3, keepdim=True)) / 2

    def _last(self, tile: Tile) -> Tensor:
        """Return, for each row of a tile, the last key whose decay is included, int64 ``[B | 1, 1, R]``."""
        last = self.last[tile.batch] if len(self.last) > 1 else self.last
        return at(last, tile.rows, 1)[:, None]
