"""ChannelAttention: a gate for every channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.nn.projections import weight_of
from saccade.support.argument_hints import ArgumentHints
from saccade.support.validation import check_bool, check_choice
from saccade.vision.feature_map import check_features, reduced

_POOLINGS = (("average",), ("average", "max"))


class ChannelAttention(ArgumentHints, nn.Module):
    r"""A gate for every channel: squeeze-and-excitation, or CBAM's channel gate.

    .. math:: s = \sigma\Big(\sum_{p} W_2\,\mathrm{ReLU}(W_1\,\mathrm{pool}_p(x))\Big), \qquad
              \mathrm{out}_{c} = s_c\, x_{c}

    Each channel is pooled to one number; two layers with a bottleneck compute gates between 0 and 1 from them. The
    gates are independent: they do not sum to 1, so they are not an attention distribution.

    Args:
        channels: channels of the feature map.
        ratio: the bottleneck has ``channels / ratio`` units; divides ``channels``.
        pooling: ``("average",)`` is squeeze-and-excitation; ``("average", "max")`` applies the same layers to
            both poolings and adds the results, as in CBAM.
        projection_bias: whether the two layers have a bias.

    Raises:
        ValueError, TypeError: sizes that do not fit, or features of another shape or dtype.

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
        hidden = reduced(channels, ratio)
        pooling = tuple(pooling) if isinstance(pooling, list) else pooling
        self.pooling = check_choice("pooling", pooling, _POOLINGS)
        check_bool("projection_bias", projection_bias)
        self.channels, self.ratio = channels, ratio
        self.reduce = nn.Linear(channels, hidden, bias=projection_bias)
        self.expand = nn.Linear(hidden, channels, bias=projection_bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return ``[batch, channels, H, W]``, every channel times its gate."""
        return features * self.weights(features)[:, :, None, None]

    def weights(self, features: Tensor) -> Tensor:
        """Return the gates, ``[batch, channels]``, each between 0 and 1; differentiable.

        Args:
            features: ``[batch, channels, H, W]``.
        """
        check_features(features, self.channels, weight_of(self.reduce))
        logits = [self.expand(torch.relu(self.reduce(pooled(features, how)))) for how in self.pooling]
        return torch.sigmoid(sum(logits[1:], logits[0]))

    def extra_repr(self) -> str:
        return f"{self.channels}, ratio={self.ratio}, pooling={self.pooling}"


def pooled(features: Tensor, how: str) -> Tensor:
    """Return the ``average`` or the ``max`` of each channel over all positions: ``[batch, channels]``."""
    return features.mean((2, 3)) if how == "average" else features.amax((2, 3))
