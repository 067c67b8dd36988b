"""Sinusoidal: position embeddings made of sine and cosine waves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from saccade.positions.token_positions import as_positions
from saccade.support.argument_hints import ArgumentHints
from saccade.support.errors import value_error
from saccade.support.numerics import widest_dtype
from saccade.support.validation import check_int, check_number


class Sinusoidal(ArgumentHints, nn.Module):
    r"""Sinusoidal position embeddings: sine and cosine waves of increasing wavelength, added to token embeddings.

    .. math:: \mathrm{PE}(p, 2i) = \sin(p / \mathrm{base}^{2i/D}), \qquad
              \mathrm{PE}(p, 2i + 1) = \cos(p / \mathrm{base}^{2i/D})

    There are no parameters, and positions may be arbitrarily large. Angles are computed in float64 and rounded once, so
    that embeddings are exact to the last digit even at a million tokens. They have the module's dtype, as in `Learned`.

    Args:
        embed_dim: width of the model; must be even.
        base: base of the wavelengths, which range from 2π to ``2π * base``.

    Raises:
        ValueError: the width is odd or too small, the base is at most 1, or a position is below -1.
        TypeError: the positions are neither a range nor int64.

    Cost: one sine or cosine for each element of the result.

    Example:
        >>> Sinusoidal(4)(torch.tensor([0, 1, -1]))
        tensor([[0.0000, 1.0000, 0.0000, 1.0000],
                [0.8415, 0.5403, 0.0100, 0.9999],
                [0.0000, 0.0000, 0.0000, 0.0000]])

    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
    """

    _like: Tensor

    def __init__(self, embed_dim: int, *, base: float = 10000.0):
        super().__init__()
        self.embed_dim = check_int("embed_dim", embed_dim)
        self.base = check_number("base", base, above=1)
        if embed_dim % 2:
            hint = "each frequency has a sine and a cosine"
            raise value_error("embed_dim", "be even", embed_dim, hint=hint)
        # An empty buffer, not in the state dict, that follows the module's dtype and so determines the output's dtype.
        self.register_buffer("_like", torch.empty(0), persistent=False)

    def forward(self, positions: range | Tensor) -> Tensor:
        """Return the sinusoidal embeddings of the given positions.

        Args:
            positions: a range, or int64 with any shape; -1 (no token) gives zeros.

        Returns:
            ``[..., embed_dim]``.
        """
        place = as_positions(positions, self._like.device if isinstance(positions, range) else None)
        exponents = (
            torch.arange(0, self.embed_dim, 2, dtype=widest_dtype(place.device), device=place.device) / self.embed_dim
        )
        angles = place[..., None] * self.base**-exponents
        waves = torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)
        return waves.masked_fill(place[..., None] < 0, 0.0).to(self._like.dtype)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *others: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)
        if self._like.is_meta and local_metadata.get("assign_to_params_buffers", False):
            self._like = torch.empty(0)  # not in the state dict, so it would otherwise stay on "meta"

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, base={self.base:g}"
