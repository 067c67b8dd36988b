"""PositionAttention: every position of a feature map attends to all positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from saccade.matrix import AttentionMatrix
from saccade.support.argument_hints import ArgumentHints
from saccade.vision.feature_map import as_map, as_tokens, bottleneck_width, check_features


class PositionAttention(ArgumentHints, nn.Module):
    r"""Self-attention over the H·W positions of a feature map.

    .. math:: \mathrm{out} = x + \gamma\, A V, \qquad A = \mathrm{softmax}(Q^\top K),\quad
              Q = W_q x,\ K = W_k x,\ V = W_v x

    The scores are not scaled, as in both papers. γ is learned and starts at 0, so a new module is the identity. The
    full matrix is never stored, so memory is linear in the number of positions.

    Args:
        channels: channels of the feature map and of the values.
        ratio: queries and keys have ``channels / ratio`` channels; must divide ``channels``.

    Raises:
        ValueError, TypeError: the sizes are incompatible, or the features have the wrong shape or dtype.

    Cost: O(batch · (H·W)² · channels) time, O(batch · H·W · channels) memory.

    Example:
        >>> module = PositionAttention(32)
        >>> x = torch.randn(2, 32, 5, 7)
        >>> torch.equal(module(x), x), module.matrix(x)
        (True, AttentionMatrix(shape=[2, 1, 35, 35], torch.float32, cpu))

    Reference: Zhang et al. 2019, arXiv:1805.08318, section 3; Fu et al. 2019, arXiv:1809.02983, section 3.2.
    """

    def __init__(self, channels: int, ratio: int = 8):
        super().__init__()
        hidden = bottleneck_width(channels, ratio)
        self.channels, self.ratio = channels, ratio
        self.query = nn.Conv2d(channels, hidden, 1)
        self.key = nn.Conv2d(channels, hidden, 1)
        self.value = nn.Conv2d(channels, channels, 1)
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, features: Tensor) -> Tensor:
        """Return the position attention's output ``features + gamma * (A @ value)``, ``[batch, channels, H, W]``."""
        gathered = self.matrix(features) @ as_tokens(self.value(features))
        return features + self.gamma * as_map(gathered, *features.shape[2:])

    def matrix(self, features: Tensor) -> AttentionMatrix:
        """Return the lazy attention matrix, ``[batch, 1, H·W, H·W]``; position (y, x) is row ``y * W + x``.

        Args:
            features: ``[batch, channels, H, W]``.
        """
        check_features(features, self.channels, self.gamma)
        query, key = as_tokens(self.query(features)), as_tokens(self.key(features))
        return AttentionMatrix(query, key, scale=1.0)

    def extra_repr(self) -> str:
        return f"{self.channels}, ratio={self.ratio}"
