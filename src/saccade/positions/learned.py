"""Learned: a trainable embedding for each position."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.positions.token_positions import as_positions, check_below
from saccade.support.argument_hints import ArgumentHints
from saccade.support.validation import check_int


class Learned(ArgumentHints, nn.Module):
    """Learned position embeddings: one trainable vector for each of ``max_len`` positions, added to token embeddings.

    Args:
        max_len: number of positions.
        embed_dim: width of the model.

    Attributes:
        weight: ``[max_len, embed_dim]``, as in ``nn.Embedding``; initially normal with a standard deviation of 0.02.

    Raises:
        ValueError: a size is not an int of at least 1, or a position is below -1 or at least ``max_len``. Positions are
            checked only on the CPU, where reading them is cheap; on other devices, torch's lookup raises an error.
        TypeError: the positions are neither a range nor int64.

    Cost: ``max_len * embed_dim`` parameters.

    Example:
        >>> encoding = Learned(512, 8)
        >>> encoding(torch.tensor([[0, 1, 2], [0, 1, -1]])).shape
        torch.Size([2, 3, 8])

    Reference: Gehring et al. 2017, arXiv:1705.03122, section 3.1; Devlin et al. 2019, arXiv:1810.04805.
    """

    def __init__(self, max_len: int, embed_dim: int):
        super().__init__()
        self.max_len = check_int("max_len", max_len)
        self.embed_dim = check_int("embed_dim", embed_dim)
        self.weight = nn.Parameter(torch.zeros(max_len, embed_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialise all position embeddings at random, with a standard deviation of 0.02 as in BERT and GPT-2."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, positions: range | Tensor) -> Tensor:
        """Return the learned embeddings of the given positions.

        Args:
            positions: a range, or int64 with any shape; -1 (no token) gives zeros.

        Returns:
            ``[..., embed_dim]``, differentiable in the weight.
        """
        place = as_positions(positions, self.weight.device)
        check_below(place, self.max_len, "Sinusoidal and relative positions have no length limit")
        return F.embedding(place.clamp(min=0), self.weight).masked_fill(place[..., None] < 0, 0.0)

    def extra_repr(self) -> str:
        return f"{self.max_len}, {self.embed_dim}"
