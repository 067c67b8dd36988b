"""CBAM and BAM: modules that combine a channel gate with a spatial gate for feature maps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from saccade.nn.projections import weight_of
from saccade.support.argument_hints import ArgumentHints
from saccade.support.validation import check_choice, check_int
from saccade.vision.feature_map import BatchNorm, bottleneck_width, check_features
from saccade.vision.gates import ChannelAttention, SpatialAttention, pooled

ORDERS = ("channel-spatial", "spatial-channel")


class Gates(NamedTuple):
    """The channel gate and the spatial gate of CBAM or BAM.

    Attributes:
        channel: ``[batch, channels]``, between 0 and 1.
        spatial: ``[batch, 1, H, W]``, between 0 and 1.
    """

    channel: Tensor
    spatial: Tensor


class CBAM(ArgumentHints, nn.Module):
    r"""The convolutional block attention module: a channel gate, then a spatial gate.

    .. math:: x' = s_{\mathrm{channel}}(x) \odot x, \qquad \mathrm{out} = s_{\mathrm{spatial}}(x') \odot x'

    The second gate is computed from the output of the first, so the order matters.

    Args:
        channels: channels of the feature map.
        ratio: the channel gate's bottleneck has ``channels / ratio`` units; must divide ``channels``.
        kernel_size: kernel size of the spatial gate's convolution; must be odd.
        order: ``"channel-spatial"``, which the paper found best, or ``"spatial-channel"``.
        norm: whether a batch norm follows the spatial gate's convolution, as in the authors' code.
        projection_bias: whether the channel gate's two layers have a bias; the paper's formula has none.

    Raises:
        ValueError, TypeError: the sizes are incompatible, or the features have the wrong shape or dtype.

    Cost: as for `ChannelAttention` with two poolings, plus `SpatialAttention`.

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
        """Return the feature map ``[batch, channels, H, W]`` with both of CBAM's gates applied."""
        return self._apply_gates(features)[0]

    def weights(self, features: Tensor) -> Gates:
        """Return CBAM's two gates, ``(channel [batch, channels], spatial [batch, 1, H, W])``.

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


class BAM(ArgumentHints, nn.Module):
    r"""The bottleneck attention module: one gate computed from channel and spatial logits.

    .. math:: \mathrm{out} = x + x \odot \sigma\big(M_c(x) + M_s(x)\big), \qquad
              M_c = \mathrm{norm}(W_2\,\mathrm{ReLU}(W_1\,\mathrm{mean}_{hw}\, x)), \quad
              M_s = \mathrm{norm}(f^{1 \times 1}(f_d^{3 \times 3}(f_d^{3 \times 3}(f^{1 \times 1}(x)))))

    with a ReLU after each of the first three convolutions. Channel and spatial logits are added before a single
    sigmoid, so unlike in `CBAM`, neither gate comes first. The residual connection preserves features where the gate is
    closed.

    Args:
        channels: channels of the feature map.
        ratio: each branch has ``channels / ratio`` inner channels; must divide ``channels``.
        dilation: dilation of the two 3×3 convolutions; their receptive field is ``4 · dilation + 1`` positions wide.

    Raises:
        ValueError, TypeError: the sizes are incompatible, the features have the wrong shape or dtype, or the module is
            trained with batch size 1, for which the batch norm has no variance.

    Cost: O(batch · channels² / ratio · (H · W + 1)) plus the two 3×3 convolutions on the reduced channels.

    Example:
        >>> bam = BAM(32, ratio=8)
        >>> x = torch.randn(2, 32, 5, 7)
        >>> bam(x).shape, bam.gate(x).shape
        (torch.Size([2, 32, 5, 7]), torch.Size([2, 32, 5, 7]))

    Reference: Park et al. 2018, arXiv:1807.06514, section 3. This class follows the paper; the authors' code instead
    multiplies the two logits and normalizes inside the branches.
    """

    def __init__(self, channels: int, ratio: int = 16, *, dilation: int = 4):
        super().__init__()
        hidden = bottleneck_width(channels, ratio)
        self.channels, self.ratio, self.dilation = channels, ratio, check_int("dilation", dilation)
        self.reduce = nn.Linear(channels, hidden)
        self.expand = nn.Linear(hidden, channels)
        self.channel_norm = BatchNorm(channels)
        self.convs = nn.Sequential(
            nn.Conv2d(channels, hidden, 1),
            nn.ReLU(),
            nn.Conv2d(hidden, hidden, 3, padding=dilation, dilation=dilation),
            nn.ReLU(),
            nn.Conv2d(hidden, hidden, 3, padding=dilation, dilation=dilation),
            nn.ReLU(),
            nn.Conv2d(hidden, 1, 1),
        )
        self.spatial_norm = BatchNorm(1)

    def forward(self, features: Tensor) -> Tensor:
        """Return the gated feature map ``features + features * gate(features)``, ``[batch, channels, H, W]``."""
        return features + features * self.gate(features)

    def gate(self, features: Tensor) -> Tensor:
        """Return the gate that BAM's `forward` applies, ``[batch, channels, H, W]``, between 0 and 1.

        Args:
            features: ``[batch, channels, H, W]``.
        """
        channel, spatial = self._logits(features)
        return torch.sigmoid(channel[:, :, None, None] + spatial)

    def weights(self, features: Tensor) -> Gates:
        """Return the gates of BAM's two branches, ``(channel [batch, channels], spatial [batch, 1, H, W])``.

        The two logits sum to the logit of `gate`, but the product of the two gates does not equal `gate`.

        Args:
            features: ``[batch, channels, H, W]``.
        """
        channel, spatial = self._logits(features)
        return Gates(torch.sigmoid(channel), torch.sigmoid(spatial))

    def extra_repr(self) -> str:
        return f"{self.channels}, ratio={self.ratio}, dilation={self.dilation}"

    def _logits(self, features: Tensor) -> tuple[Tensor, Tensor]:
        check_features(features, self.channels, weight_of(self.reduce))
        self.channel_norm.check_spread(features.shape[0])
        channel = self.expand(torch.relu(self.reduce(pooled(features, "average"))))
        channel = self.channel_norm(channel[:, :, None, None])[:, :, 0, 0]
        return channel, self.spatial_norm(self.convs(features))
