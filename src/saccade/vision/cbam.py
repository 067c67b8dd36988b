"""CBAM: a channel gate and a spatial gate, one after the other."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from saccade.nn.projections import weight_of
from saccade.support.argument_hints import ArgumentHints
from saccade.support.validation import check_choice
from saccade.vision.channel import ChannelAttention
from saccade.vision.feature_map import check_features
from saccade.vision.spatial import SpatialAttention

ORDERS = ("channel-spatial", "spatial-channel")


class Gates(NamedTuple):
    """The gates of a module with a channel and a spatial gate.

    Attributes:
        channel: ``[batch, channels]``, between 0 and 1.
        spatial: ``[batch, 1, H, W]``, between 0 and 1.
    """

    channel: Tensor
    spatial: Tensor


class CBAM(ArgumentHints, nn.Module):
    r"""The convolutional block attention module: a channel gate, then a spatial gate.

    .. math:: x' = s_{\mathrm{channel}}(x) \odot x, \qquad \mathrm{out} = s_{\mathrm{spatial}}(x') \odot x'

    The second gate reads the output of the first, so the order matters.

    Args:
        channels: channels of the feature map.
        ratio: the channel gate's bottleneck has ``channels / ratio`` units; divides ``channels``.
        kernel_size: kernel of the spatial gate's convolution; odd.
        order: ``"channel-spatial"``, which the paper found best, or ``"spatial-channel"``.
        norm: whether a batch norm follows the spatial gate's convolution, as in the authors' code.
        projection_bias: whether the channel gate's two layers have a bias; the paper's formula has none.

    Raises:
        ValueError, TypeError: sizes that do not fit, or features of another shape or dtype.

    Cost: the sum of its two parts, `ChannelAttention` with two poolings and `SpatialAttention`.

    Example:
        >>> import torch
        >>> cbam = CBAM(32, ratio=8)
        >>> x = torch.randn(2, 32, 5, 7)
        >>> channel, spatial = cbam.weights(x)
        >>> cbam(x).shape, channel.shape, spatial.shape
        (torch.Size([2, 32, 5, 7]), torch.Size([2, 32]), torch.Size([2, 1, 5, 7]))

    Reference: Woo et al. 2018, arXiv:1807.06521, section 3.
    """

    def __init__(
        self,
        channels: int,
        ratio: int = 16,
        kernel_size: int = 7,
        *,
        order: str = "channel-spatial",
        norm: bool = True,
        projection_bias: bool = False,
    ):
        super().__init__()
        self.channels, self.order = channels, check_choice("order", order, ORDERS)
        self.channel = ChannelAttention(channels, ratio, pooling=("average", "max"), projection_bias=projection_bias)
        self.spatial = SpatialAttention(kernel_size, norm=norm)

    def forward(self, features: Tensor) -> Tensor:
        """Return ``[batch, channels, H, W]`` with both gates applied."""
        return self._apply_gates(features)[0]

    def weights(self, features: Tensor) -> Gates:
        """Return both gates of `forward`, ``(channel [batch, channels], spatial [batch, 1, H, W])``.

        Args:
            features: ``[batch, channels, H, W]``.
        """
        return self._apply_gates(features)[1]

    def extra_repr(self) -> str:
        return f"order={self.order!r}"

    def _apply_gates(self, features: Tensor) -> tuple[Tensor, Gates]:
        check_features(features, self.channels, weight_of(self.spatial.conv))
        self.spatial.check(features)
        spatial = None
        if self.order == "spatial-channel":
            spatial = self.spatial.weights(features)
            features = features * spatial
        channel = self.channel.weights(features)
        features = features * channel[:, :, None, None]
        if spatial is None:
            spatial = self.spatial.weights(features)
            features = features * spatial
        return features, Gates(channel, spatial)
