"""Causal convolutions."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["DilatedConvolutions", "ShortConvolution"]


class ShortConvolution(nn.Module):
    """Each channel mixes a token with the few before it.

    Args:
        width: channels.
        size: tokens that are mixed, the token itself included.
        dilation: distance between them.

    Example:
        >>> import torch
        >>> ShortConvolution(4, 3)(torch.ones(1, 5, 4)).shape
        torch.Size([1, 5, 4])
    """

    def __init__(self, width: int, size: int, dilation: int = 1):
        super().__init__()
        self.convolution = nn.Conv1d(width, width, size, groups=width, dilation=dilation)
        self.reach = (size - 1) * dilation

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same."""
        return self.convolution(F.pad(x.mT, (self.reach, 0))).mT


class DilatedConvolutions(nn.Module):
    """Three convolutions of three tokens, each twice as far apart as the one before, and channels mixed between.

    Args:
        width: channels.
        layer: from 0; distances go on where those of the layer below ended.

    Reference: van den Oord et al. 2016, arXiv:1609.03499, section 2.1.
    """

    def __init__(self, width: int, layer: int):
        super().__init__()
        self.convolutions = nn.ModuleList(ShortConvolution(width, 3, 2 ** (3 * layer + i)) for i in range(3))
        self.mixing = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same."""
        for convolution, mixing in zip(self.convolutions, self.mixing, strict=True):
            x = x + F.gelu(mixing(convolution(x)))
        return x
