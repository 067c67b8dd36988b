"""ECA: a gate for every channel, from its neighbours."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from saccade.nn.projections import weight_of
from saccade.support.argument_hints import ArgumentHints
from saccade.support.errors import value_error
from saccade.support.validation import check_int, check_number
from saccade.vision.channel import pooled
from saccade.vision.feature_map import check_features


class ECA(ArgumentHints, nn.Module):
    r"""Efficient channel attention: a gate for every channel, from one small convolution.

    .. math:: s = \sigma(w * \mathrm{mean}(x)), \qquad \mathrm{out}_c = s_c\, x_c

    Each channel is pooled to its mean, and a convolution along the channels computes the gates, so that a gate depends
    on the nearest ``kernel_size`` channels. There is no bottleneck, unlike in `ChannelAttention`. Channels beyond the
    ends count as 0. The gates are independent: they do not sum to 1.

    Args:
        channels: channels of the feature map.
        kernel_size: kernel of the convolution, odd; if None, the smallest odd number of at least
            :math:`t = \lfloor (\log_2 \mathrm{channels} + b) / \gamma \rfloor`.
        gamma: γ, which slows the growth of the kernel with the channels.
        offset: b.

    Raises:
        ValueError, TypeError: an even kernel, or features of another shape or dtype.

    Cost: O(batch · channels · H · W) for the pooling, O(batch · channels · kernel_size) for the gates.

    Example:
        >>> gate = ECA(256)
        >>> x = torch.randn(2, 256, 5, 7)
        >>> gate.kernel_size, gate(x).shape, gate.weights(x).shape
        (5, torch.Size([2, 256, 5, 7]), torch.Size([2, 256]))

    Reference: Wang et al. 2020, arXiv:1910.03151, section 3.2.
    """

    def __init__(self, channels: int, kernel_size: int | None = None, *, gamma: float = 2.0, offset: float = 1.0):
        super().__init__()
        self.channels = check_int("channels", channels)
        least = abs(math.log2(channels) + check_number("offset", offset)) / check_number("gamma", gamma, above=0)
        chosen = int(least) // 2 * 2 + 1 if kernel_size is None else check_int("kernel_size", kernel_size)
        if chosen % 2 == 0:  # gates would be shifted by half a channel
            raise value_error("kernel_size", "be odd, so that it has a centre", chosen)
        self.kernel_size = chosen
        self.conv = nn.Conv1d(1, 1, chosen, padding=chosen // 2, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Return ``[batch, channels, H, W]``, every channel times its gate."""
        return features * self.weights(features)[:, :, None, None]

    def weights(self, features: Tensor) -> Tensor:
        """Return the gates, ``[batch, channels]``, each between 0 and 1; differentiable.

        Args:
            features: ``[batch, channels, H, W]``.
        """
        check_features(features, self.channels, weight_of(self.conv))
        return torch.sigmoid(self.conv(pooled(features, "average")[:, None])[:, 0])

    def extra_repr(self) -> str:
        return f"{self.channels}, kernel_size={self.kernel_size}"
