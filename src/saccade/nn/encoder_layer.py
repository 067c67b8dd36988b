"""EncoderLayer: self-attention, then a feed-forward network."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from saccade.nn.attention import MultiHeadAttention
from saccade.nn.norms import Norm
from saccade.nn.residual import ResidualLayer
from saccade.positions.tokens import GivenPositions

__all__ = ["EncoderLayer"]


class EncoderLayer(ResidualLayer):
    r"""Tokens look at each other, then each is transformed by itself; both results are added to the input.

    .. math:: \text{norm first:}\quad x' = x + \mathrm{attention}(\mathrm{norm}(x)), \quad
              x'' = x' + \mathrm{ff}(\mathrm{norm}(x')); \qquad
              \text{else:}\quad x' = \mathrm{norm}(x + \mathrm{attention}(x)), \quad \dots

    The layer is made of parts. Options of attention (mask, mechanism, rotary, grouped heads) belong to the attention,
    those of the feed-forward network to the network.

    Args:
        attention: a `MultiHeadAttention`.
        feed_forward: a `FeedForward`, or any module from ``[batch, len, embed_dim]`` to the same.
        norm: ``"layer"``, ``"layer_without_bias"`` or ``"rms"`` (root mean square, without a mean or a bias).
        norm_eps: added to the variance in the norms.
        norm_first: whether norms come before each part (as in most models now) or after each sum (as in the paper).
        dropout_p: of what each part adds, in training only.

    Attributes:
        attention_norm, feed_forward_norm: the norms; any module may be put in their place.

    Raises:
        TypeError: a part of the wrong kind.
        ValueError: parts of different widths, an unknown norm.

    Example:
        >>> import torch
        >>> from saccade.nn import FeedForward
        >>> layer = EncoderLayer(MultiHeadAttention(16, 4), FeedForward(16, 64), norm="rms")
        >>> layer(torch.zeros(2, 5, 16)).shape
        torch.Size([2, 5, 16])

    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.1; norm first: Xiong et al. 2020, arXiv:2002.04745.
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        feed_forward: nn.Module,
        *,
        norm: Norm = "layer",
        norm_eps: float = 1e-5,
        norm_first: bool = True,
        dropout_p: float = 0.0,
    ):
        super().__init__({"attention": attention}, feed_forward, norm, norm_eps, norm_first, dropout_p)

    def forward(self, x: Tensor, *, mask: object = None, positions: GivenPositions = None) -> Tensor:
        """Transform.

        Args:
            x: ``[batch, len, embed_dim]``.
            mask: the facts of this batch; joined with the attention's own mask by ``&``.
            positions: where the tokens stand; see `MultiHeadAttention.forward`.

        Returns:
            ``[batch, len, embed_dim]``.
        """
        attend = partial(self.attention, mask=mask, positions=positions)
        x = self._add(x, attend, self.attention_norm)
        return self._add(x, self.feed_forward, self.feed_forward_norm)
