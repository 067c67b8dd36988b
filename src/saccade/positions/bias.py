"""Bias: the base class of position biases, which are added to the scores."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.positions.token_positions import as_positions
from saccade.support.argument_hints import ArgumentHints
from saccade.support.errors import type_error, unsupported, value_error


class Bias(ArgumentHints, nn.Module):
    """A position bias: a value added to each score that depends on the distance and possibly on the query.

    The *distance* is the query's position minus the key's. The bias is never stored as a matrix, because attention
    needs at most ``2 * len - 1`` values for each head. It is added after scores are scaled and capped.

    A subclass defines `table`, or `values` if the bias depends on the query.

    Attributes:
        reach: the distance beyond which the bias is constant, on both sides; None if there is no such limit.
    """

    reach: int | None = None

    def reset_parameters(self) -> None:
        """Set all parameters of the bias to 0, so that attention starts as if there were no bias."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def table(self, distances: Tensor) -> Tensor:
        """Return the bias of each head at the given distances.

        Args:
            distances: int64 ``[distances]``; a query's position minus a key's (or the difference of their addresses).

        Returns:
            ``[heads, distances]``, differentiable in the parameters.

        Raises:
            UnsupportedError: the bias depends on the query; use `values` instead.
        """
        reasons = ["it defines no table: its values depend on the query"]
        hint = "call values(distances, query, scale) instead"
        raise unsupported(type(self).__name__, reasons, hint=hint)

    def values(self, distances: Tensor, query: Tensor, scale: float) -> Tensor:
        """Return the bias at the given distances; it may depend on the query.

        Args:
            distances: int64 ``[distances]``, consecutive and ascending.
            query: ``[batch, heads, q_len, head_dim]``.
            scale: factor that multiplies the dot products.

        Returns:
            ``[batch | 1, heads | 1, q_len | 1, distances]``, differentiable in the parameters, and in the query if the
            bias depends on it.
        """
        return self.table(distances)[None, :, None, :]

    def to_dense(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        query: Tensor | None = None,
        scale: float = 1.0,
        q_positions: Tensor | None = None,
        kv_positions: Tensor | None = None,
    ) -> Tensor:
        """Return the bias as a dense tensor, for inspection: ``[batch | 1, heads | 1, q_len, kv_len]``.

        Args:
            q_len, kv_len: numbers of queries and keys; ``kv_len`` is ``q_len`` when None.
            query: ``[batch, heads, q_len, head_dim]``, for biases that depend on it.
            scale: factor that multiplies the dot products, for biases that depend on the query.
            q_positions, kv_positions: int64 ``[q_len]`` and ``[kv_len]``; by default, key j is at position j and query
                i at position ``kv_len - q_len + i``.
        """
        kv_len = q_len if kv_len is None else kv_len
        q = torch.arange(kv_len - q_len, kv_len) if q_positions is None else q_positions
        kv = torch.arange(kv_len) if kv_positions is None else kv_positions
        # With more queries than keys, the first queries are before position 0, which `address` may reject.
        begun = q[max(0, q_len - kv_len) :] if q_positions is None else q
        is_plain = self.address(begun) is begun
        between = (q if is_plain else self.address(q))[:, None] - self.address(kv)
        if not between.numel():
            return torch.zeros(1, 1, q_len, kv_len)
        first, last = int(between.min()), int(between.max())
        distances = torch.arange(first, last + 1)
        table = self.values(distances, torch.zeros(1, 1, q_len, 1) if query is None else query, scale)
        rows = torch.arange(q_len)[:, None] if table.shape[2] > 1 else torch.zeros(q_len, 1, dtype=torch.int64)
        return table[:, :, rows, between - first]

    def address(self, positions: Tensor) -> Tensor:
        """Convert positions to addresses, whose differences are the distances; by default, the positions themselves."""
        return as_positions(positions)


def check_distances(distances: Tensor) -> None:
    """Raise an error unless the distances for a position bias are int64 with one dimension."""
    if not isinstance(distances, Tensor) or distances.dtype != torch.int64:
        got = str(getattr(distances, "dtype", type(distances).__name__)).removeprefix("torch.")
        raise type_error("distances", "be an int64 tensor", got)
    if distances.dim() != 1:
        hint = "a distance is a query's position minus a key's: torch.arange(-3, 4)"
        raise value_error("distances", "have one axis", list(distances.shape), hint=hint)
