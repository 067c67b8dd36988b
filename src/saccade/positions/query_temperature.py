"""QueryTemperature: a factor for queries that grows with position, so that attention stays sharp at long lengths."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from saccade.positions.token_positions import GivenPositions, as_positions
from saccade.support.argument_hints import argument_hints
from saccade.support.validation import check_int, check_number


@argument_hints()
@dataclasses.dataclass(frozen=True)
class QueryTemperature:
    r"""A factor for queries that grows with the logarithm of their position.

    .. math:: f(p) = 1 + \mathrm{strength} \cdot \log \Big( 1 + \Big\lfloor \frac{p + \mathrm{first}}{\mathrm{interval}}
              \Big\rfloor \Big)

    The more keys a query sees, the larger its scores must be for the weights to stay equally sharp. In packed
    sequences, each document's positions start at 0.

    Args:
        interval: number of consecutive positions with the same factor, at least 1; the first interval has the factor 1.
        strength: how much the factor grows, above 0.
        first: offset that the formula adds to each position: 0 (Ministral 3) or 1 (Llama 4).

    Raises:
        ValueError: an argument does not meet the conditions above.

    Example:
        >>> QueryTemperature(4, 0.5).factors([0, 3, 4, 12])
        tensor([[1.0000, 1.0000, 1.3466, 1.6931]])

    Reference: Nakanishi 2025, arXiv:2501.19399 (scalable softmax); Llama 4 and Ministral 3 use the formula above.
    """

    interval: int
    strength: float
    first: int = 0

    def __post_init__(self) -> None:
        check_int("interval", self.interval)
        check_number("strength", self.strength, above=0)
        check_int("first", self.first, 0, below=2)

    def factors(self, positions: GivenPositions, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the factor of each position, ``[batch | 1, len]``; 1 for padding (-1).

        Args:
            positions: a range, or int64 ``[len]`` or ``[batch, len]`` (a tensor or a list).
            dtype: dtype of the factors.
        """
        place = torch.atleast_2d(as_positions(positions))
        steps = (place.clamp(min=0) + self.first).div(self.interval, rounding_mode="floor")
        factors = 1.0 + self.strength * torch.log1p(
            steps.to(torch.float64 if dtype == torch.float64 else torch.float32)
        )
        return factors.masked_fill(place < 0, 1.0).to(dtype)
