"""Bias: a term of the scores that depends on where query and key stand."""

from __future__ import annotations

from torch import Tensor, nn

from saccade.errors import unsupported
from saccade.positions.checks import as_positions

__all__ = ["Bias"]


class Bias(nn.Module):
    """A term added to the scores that depends on where query and key stand, and on nothing else but the query.

    It is a function of one number, the *distance*: the query's position minus the key's. So it is never a matrix: an
    attention reads at most ``2 * len - 1`` numbers for each head. Scores are scaled and capped before it is added.

    A subclass defines `table`, or, where the numbers depend on the query, `values`.

    Attributes:
        reach: beyond this distance, on both sides, nothing changes any more; None: every distance has its own number.
    """

    reach: int | None = None

    def reset_parameters(self) -> None:
        """Set all trainable numbers to 0, so that attention starts as if there were no such term."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def table(self, distances: Tensor) -> Tensor:
        """One number for each head and distance.

        Args:
            distances: int64 ``[distances]``; a query's position minus a key's (or the difference of their addresses).

        Returns:
            ``[heads, distances]``, differentiable in the parameters.

        Raises:
            UnsupportedError: the numbers depend on the query; `values` gives them.
        """
        reasons = ["it defines no table: its numbers depend on the query"]
        hint = "values(distances, query, scale) gives them"
        raise unsupported(f"{type(self).__name__}.table", type(self).__name__, reasons, hint=hint)

    def values(self, distances: Tensor, query: Tensor, scale: float) -> Tensor:
        """What is added to the scores, for each of these distances.

        Args:
            distances: int64 ``[distances]``, consecutive and ascending.
            query: ``[batch, heads, q_len, head_dim]``.
            scale: factor of the dot products.

        Returns:
            ``[batch | 1, heads | 1, q_len | 1, distances]``, differentiable in the parameters, and in the query where
            it depends on it.
        """
        return self.table(distances)[None, :, None, :]

    def address(self, positions: Tensor) -> Tensor:
        """What distances are taken between: the positions themselves, unless they lie on a grid."""
        return as_positions(type(self).__name__, positions)
