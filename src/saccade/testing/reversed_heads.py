"""A relative bias with its heads in reverse order."""

from __future__ import annotations

from torch import Tensor

from saccade.positions import Bias

__all__ = ["ReversedHeads"]


class ReversedHeads(Bias):
    """What another bias gives to the last head, this one gives to the first.

    Args:
        inner: the other bias.
    """

    def __init__(self, inner: Bias):
        super().__init__()
        self.inner, self.reach = inner, inner.reach

    def values(self, distances: Tensor, query: Tensor, scale: float) -> Tensor:
        return self.inner.values(distances, query.flip(1), scale).flip(1)

    def address(self, positions: Tensor) -> Tensor:
        return self.inner.address(positions)
