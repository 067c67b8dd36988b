"""SpatialAttention: a gate for every position."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.nn.projections import weight_of
from saccade.support.argument_hints import ArgumentHints
from saccade.support.errors import value_error
from saccade.support.validation import check_bool, check_int
from saccade.vision.feature_map import BatchNorm, check_features


class SpatialAttention(ArgumentHints, nn.Module):
    r"""CBAM's spatial gate: a gate for every position.

    .. math:: s = \sigma\big(\mathrm{norm}(f^{k \times k}([\mathrm{mean}_c\, x;\ \mathrm{max}_c\, x]))\big), \qquad
              \mathrm{out}_{chw} = s_{hw}\, x_{chw}

    The channels are pooled to two maps, and a convolution computes a gate for each position from them. A gate depends
    on the nearest ``kernel_size`` rows and columns only; `PositionAttention` compares all positions.

    Args:
        kernel_size: kernel of the convolution; odd.
        norm: whether a batch norm follows the convolution, as in the authors' code; the paper's formula has none.

    Raises:
        ValueError, TypeError: an even kernel, features of another shape or dtype, or a single position in training
            with ``norm``.

    Cost: O(batch · (channels + kernel_size²) · H · W).

    Example:
        >>> gate = SpatialAttention(kernel_size=3)
        >>> x = torch.randn(2, 32, 5, 7)
        >>> gate(x).shape, gate.weights(x).shape
        (torch.Size([2, 32, 5, 7]), torch.Size([2, 1, 5, 7]))

    Reference: Woo et al. 2018, arXiv:1807.06521, section 3.2.
    """

    def __init__(self, kernel_size: int = 7, *, norm: bool = True):
        super().__init__()
        self.kernel_size = check_int("kernel_size", kernel_size)
        if kernel_size % 2 == 0:  # gates would be shifted by half a position
            raise value_error("kernel_size", "be odd, so that it has a centre", kernel_size)
        self.conv = nn.Conv2d(2, 1, kernel_size, padding=kernel_size // 2, bias=False)
        self.norm = BatchNorm(1) if check_bool("norm", norm) else None

    def forward(self, features: Tensor) -> Tensor:
        """Return ``[batch, channels, H, W]``, every position times its gate."""
        return features * self.weights(features)

    def weights(self, features: Tensor) -> Tensor:
        """Return the gates, ``[batch, 1, H, W]``, each between 0 and 1; differentiable.

        Args:
            features: ``[batch, channels, H, W]``, any number of channels.
        """
        self.check(features)
        logits = self.conv(torch.cat([features.mean(1, keepdim=True), features.amax(1, keepdim=True)], 1))
        return torch.sigmoid(logits if self.norm is None else self.norm(logits))

    def check(self, features: Tensor) -> None:
        """Raise unless `forward` accepts the features.

        Raises:
            ValueError, TypeError: see the class.
        """
        check_features(features, None, weight_of(self.conv))
        if self.norm is not None:
            self.norm.check_spread(features[:, 0].numel())
