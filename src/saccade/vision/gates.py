"""Attention gates for feature maps: ChannelAttention and ECA for channels, SpatialAttention for positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from saccade.nn.projections import weight_of
from saccade.support.argument_hints import ArgumentHints
from saccade.support.errors import value_error
from saccade.support.validation import check_bool, check_choice, check_int, check_number
from saccade.vision.feature_map import BatchNorm, bottleneck_width, check_features

_POOLINGS = (("average",), ("average", "max"))


class ChannelAttention(ArgumentHints, nn.Module):
    r"""A gate for every channel: squeeze-and-excitation, or CBAM's channel gate.

    .. math:: s = \sigma\Big(\sum_{p} W_2\,\mathrm{ReLU}(W_1\,\mathrm{pool}_p(x))\Big), \qquad
              \mathrm{out}_{c} = s_c\, x_{c}

    Each channel is pooled to a scalar. From these scalars, two layers with a bottleneck compute gates between 0 and 1.
    The gates are independent: they do not sum to 1, so they are not an attention distribution.

    Args:
        channels: channels of the feature map.
        ratio: the bottleneck has ``channels / ratio`` units; must divide ``channels``.
        pooling: ``("average",)`` for squeeze-and-excitation; ``("average", "max")`` to apply the same layers to both
            poolings and add the results, as in CBAM.
        projection_bias: whether the two layers have a bias.

    Raises:
        ValueError, TypeError: the sizes are incompatible, or the features have the wrong shape or dtype.

    Cost: O(batch · channels · H · W) for the pooling, O(batch · channels² / ratio) for the layers.

    Example:
        >>> gate = ChannelAttention(32, ratio=8)
        >>> x = torch.randn(2, 32, 5, 7)
        >>> gate(x).shape, gate.weights(x).shape
        (torch.Size([2, 32, 5, 7]), torch.Size([2, 32]))

    Reference: Hu et al. 2018, arXiv:1709.01507, section 3; Woo et al. 2018, arXiv:1807.06521, section 3.1.
    """

    def __init__(
        self,
        channels: int,
        ratio: int = 16,
        *,
        pooling: tuple[str, ...] = ("average",),
        projection_bias: bool = True,
    ):
        super().__init__()
        hidden = bottleneck_width(channels, ratio)
        pooling = tuple(pooling) if isinstance(pooling, list) else pooling
        self.pooling = check_choice("pooling", pooling, _POOLINGS)
        check_bool("projection_bias", projection_bias)
        self.channels, self.ratio = channels, ratio
        self.reduce = nn.Linear(channels, hidden, bias=projection_bias)
        self.expand = nn.Linear(hidden, channels, bias=projection_bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return the features ``[batch, channels, H, W]``, with every channel multiplied by its gate."""
        return features * self.weights(features)[:, :, None, None]

    def weights(self, features: Tensor) -> Tensor:
        """Return the channel gates, ``[batch, channels]``, each between 0 and 1; differentiable.

        Args:
            features: ``[batch, channels, H, W]``.
        """
        check_features(features, self.channels, weight_of(self.reduce))
        logits = [self.expand(torch.relu(self.reduce(pooled(features, how)))) for how in self.pooling]
        return torch.sigmoid(sum(logits[1:], logits[0]))

    def extra_repr(self) -> str:
        return f"{self.channels}, ratio={self.ratio}, pooling={self.pooling}"


def pooled(features: Tensor, how: str) -> Tensor:
    """Pool each channel of a feature map to its average or maximum over all positions: ``[batch, channels]``.

    Args:
        features: ``[batch, channels, H, W]``.
        how: "average" or "max".
    """
    return features.mean((2, 3)) if how == "average" else features.amax((2, 3))


class ECA(ArgumentHints, nn.Module):
    r"""Efficient channel attention: a gate for every channel, computed by a small convolution.

    .. math:: s = \sigma(w * \mathrm{mean}(x)), \qquad \mathrm{out}_c = s_c\, x_c

    Each channel is pooled to its mean, and a convolution along the channels computes the gates. A gate thus depends on
    the nearest ``kernel_size`` channels. Unlike in `ChannelAttention`, there is no bottleneck. The sequence of channels
    is padded with 0 at both ends. The gates are independent: they do not sum to 1.

    Args:
        channels: channels of the feature map.
        kernel_size: size of the convolution kernel, odd; if None, the smallest odd integer that is at least
            :math:`t = \lfloor (\log_2 \mathrm{channels} + b) / \gamma \rfloor`.
        gamma: γ in the formula; larger values make the kernel grow more slowly with the number of channels.
        offset: b in the formula.

    Raises:
        ValueError, TypeError: the kernel size is even, or the features have the wrong shape or dtype.

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
        if chosen % 2 == 0:  # an even kernel would shift gates by half a channel
            raise value_error("kernel_size", "be odd, so that it has a centre", chosen)
        self.kernel_size = chosen
        self.conv = nn.Conv1d(1, 1, chosen, padding=chosen // 2, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Return the features ``[batch, channels, H, W]``, with every channel multiplied by its ECA gate."""
        return features * self.weights(features)[:, :, None, None]

    def weights(self, features: Tensor) -> Tensor:
        """Return ECA's gates, ``[batch, channels]``, each between 0 and 1; differentiable.

        Args:
            features: ``[batch, channels, H, W]``.
        """
        check_features(features, self.channels, weight_of(self.conv))
        return torch.sigmoid(self.conv(pooled(features, "average")[:, None])[:, 0])

    def extra_repr(self) -> str:
        return f"{self.channels}, kernel_size={self.kernel_size}"


class SpatialAttention(ArgumentHints, nn.Module):
    r"""CBAM's spatial gate: a factor between 0 and 1 for every position.

    .. math:: s = \sigma\big(\mathrm{norm}(f^{k \times k}([\mathrm{mean}_c\, x;\ \mathrm{max}_c\, x]))\big), \qquad
              \mathrm{out}_{chw} = s_{hw}\, x_{chw}

    The channels are pooled to two maps, from which a convolution computes a gate for each position. A gate depends only
    on the nearest ``kernel_size`` rows and columns, while `PositionAttention` compares all positions.

    Args:
        kernel_size: size of the convolution kernel; must be odd.
        norm: whether a batch norm follows the convolution, as in the authors' code; the paper's formula has none.

    Raises:
        ValueError, TypeError: the kernel size is even, the features have the wrong shape or dtype, or the module is
            trained with ``norm`` on a single position.

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
        if kernel_size % 2 == 0:  # an even kernel would shift gates by half a position
            raise value_error("kernel_size", "be odd, so that it has a centre", kernel_size)
        self.conv = nn.Conv2d(2, 1, kernel_size, padding=kernel_size // 2, bias=False)
        self.norm = BatchNorm(1) if check_bool("norm", norm) else None

    def forward(self, features: Tensor) -> Tensor:
        """Return the features ``[batch, channels, H, W]``, with every position multiplied by its spatial gate."""
        return features * self.weights(features)

    def weights(self, features: Tensor) -> Tensor:
        """Return the spatial gates, ``[batch, 1, H, W]``, each between 0 and 1; differentiable.

        Args:
            features: ``[batch, channels, H, W]``, with any number of channels.
        """
        self.check(features)
        logits = self.conv(torch.cat([features.mean(1, keepdim=True), features.amax(1, keepdim=True)], 1))
        return torch.sigmoid(logits if self.norm is None else self.norm(logits))

    def check(self, features: Tensor) -> None:
        """Raise an error unless the spatial gate supports the feature map.

        Raises:
            ValueError, TypeError: as listed for the class.
        """
        check_features(features, None, weight_of(self.conv))
        if self.norm is not None:
            self.norm.check_spread(features[:, 0].numel())
