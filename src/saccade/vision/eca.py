"""ECA: a gate for every channel, made of its neighbours."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from saccade.nn.projections import weight_of
from saccade.support.argument_hints import AnswersCalls
from saccade.support.errors import value_error
from saccade.support.validation import check_int, check_number
from saccade.vision.channel import pooled
from saccade.vision.feature_map import check_features

__all__ = ["ECA"]


class ECA(AnswersCalls, nn.Module):
    r"""Which channels matter in this picture, by a few numbers in all: efficient channel attention.

    .. math:: s = \sigma(w * \mathrm{mean}(x)), \qquad \mathrm{out}_c = s_c\, x_c

    Each channel is pooled to its mean, and one convolution along the channels makes the gates, so that a gate depends
    on the ``kernel_size`` channels around its own. There is no bottleneck, unlike in `ChannelAttention`. Channels
    beyond the ends count as 0. Gates are independent of one another: they do not sum to 1.

    Args:
        channels: of the feature map.
        kernel_size: of the convolution, odd; when None, the odd number of at least
            :math:`t = \lfloor (\log_2 \mathrm{channels} + b) / \gamma \rfloor`, t itself or the next.
        gamma: γ, how slowly the kernel grows with the channels.
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
        if chosen % 2 == 0:  # its gates would be shifted by half a channel
            raise value_error("kernel_size", "be odd, so that it has a centre", chosen)
        self.kernel_size = chosen
        self.conv = nn.Conv1d(1, 1, chosen, padding=chosen // 2, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """``[batch, channels, H, W]``, every channel times its gate."""
        return features * self.weights(features)[:, :, None, None]

    def weights(self, features: Tensor) -> Tensor:
        """The gates, ``[batch, channels]``, each between 0 and 1; differentiable.

        Args:
            features: ``[batch, channels, H, W]``.
        """
        check_features(features, self.channels, weight_of(self.conv))
        return torch.sigmoid(self.conv(pooled(features, "average")[:, None])[:, 0])

    def extra_repr(self) -> str:
        return f"{self.channels}, kernel_size={self.kernel_size}"
