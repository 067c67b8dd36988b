"""BAM: a gate for every channel at every position."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.nn.projections import weight_of
from saccade.support.argument_hints import ArgumentHints
from saccade.support.validation import check_int
from saccade.vision.cbam import Gates
from saccade.vision.channel import pooled
from saccade.vision.feature_map import BatchNorm, check_features, reduced


class BAM(ArgumentHints, nn.Module):
    r"""The bottleneck attention module: a gate from channel and spatial logits.

    .. math:: \mathrm{out} = x + x \odot \sigma\big(M_c(x) + M_s(x)\big), \qquad
              M_c = \mathrm{norm}(W_2\,\mathrm{ReLU}(W_1\,\mathrm{mean}_{hw}\, x)), \quad
              M_s = \mathrm{norm}(f^{1 \times 1}(f_d^{3 \times 3}(f_d^{3 \times 3}(f^{1 \times 1}(x)))))

    with a ReLU after each of the first three convolutions. The logits of a channel and of a position are added before
    one sigmoid: unlike in `CBAM` no gate comes first, and the residual preserves features at closed gates.

    Args:
        channels: channels of the feature map.
        ratio: both branches have ``channels / ratio`` inner channels; divides ``channels``.
        dilation: dilation of the two 3×3 convolutions; their field of view is ``4 · dilation + 1`` positions.

    Raises:
        ValueError, TypeError: sizes that do not fit, features of another shape or dtype, or a batch of one in
            training, where the batch norm has no variance.

    Cost: O(batch · channels² / ratio · (H · W + 1)) and the two 3×3 convolutions on the reduced channels.

    Example:
        >>> bam = BAM(32, ratio=8)
        >>> x = torch.randn(2, 32, 5, 7)
        >>> bam(x).shape, bam.gate(x).shape
        (torch.Size([2, 32, 5, 7]), torch.Size([2, 32, 5, 7]))

    Reference: Park et al. 2018, arXiv:1807.06514, section 3. The authors' code multiplies the two logits instead, and
    normalises inside the branches; this is the paper.
    """

    def __init__(self, channels: int, ratio: int = 16, *, dilation: int = 4):
        super().__init__()
        hidden = reduced(channels, ratio)
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
        """Return ``features + features * gate(features)``, ``[batch, channels, H, W]``."""
        return features + features * self.gate(features)

    def gate(self, features: Tensor) -> Tensor:
        """Return the gate that `forward` applies, ``[batch, channels, H, W]``, between 0 and 1.

        Args:
            features: ``[batch, channels, H, W]``.
        """
        channel, spatial = self._logits(features)
        return torch.sigmoid(channel[:, :, None, None] + spatial)

    def weights(self, features: Tensor) -> Gates:
        """Return the gates of each branch alone, ``(channel [batch, channels], spatial [batch, 1, H, W])``.

        Their logits add up to the logit of `gate`; the gates themselves do not multiply to it.

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
