"""StateSpace: the layer of S4D, which replaces self-attention by a state space."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from saccade.masks import Mask
from saccade.mechanisms import S4D
from saccade.nn.recurrent_layer import Read, RecurrentLayer
from saccade.support.validation import check_bool, check_int


class StateSpace(RecurrentLayer):
    r"""The layer of S4D: a state space filters each channel, then a projection mixes channels.

    .. math:: \mathrm{out} = W\, \mathrm{gelu}(A x) + b, \qquad A = \text{the S4D matrix of each channel}

    It replaces self-attention in `EncoderLayer`, `DecoderLayer` and stacks, with packed and padded sequences, and with
    a cache of constant size. It is causal.

    Args:
        embed_dim: width, and number of channels.
        state_dim: size of each channel's state; see `saccade.mechanisms.S4D`.
        mask: joined with Causal and with the mask of each call by ``&``.
        projection_bias: whether the output projection has a bias.

    Raises:
        ValueError: sizes out of range, or inputs of another width.
        UnsupportedError: a mask that a recurrence cannot apply, or a bias.

    Cost: O(n log n) for each channel, and one projection.

    Example:
        >>> layer = StateSpace(16)
        >>> layer(torch.zeros(2, 5, 16)).shape, layer.matrix(torch.zeros(2, 5, 16)).shape
        (torch.Size([2, 5, 16]), (2, 16, 5, 5))

    Reference: Gu et al. 2022, arXiv:2206.11893, section 4.
    """

    mechanism: S4D

    def __init__(self, embed_dim: int, state_dim: int = 64, *, mask: Mask | None = None, projection_bias: bool = True):
        check_int("embed_dim", embed_dim)
        check_bool("projection_bias", projection_bias)
        super().__init__(embed_dim, embed_dim, mask, S4D(embed_dim, state_dim))
        self.output_projection = nn.Linear(embed_dim, embed_dim, bias=projection_bias)
        self.reset_parameters()

    def _read(self, x: Tensor) -> Read:
        channels = x.mT[..., None]  # as heads
        return Read(self.mechanism, channels, channels, channels)

    def _merged(self, out: Tensor, read: Read) -> Tensor:
        return self.output_projection(F.gelu(out[..., 0].mT))

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, mask={self.mask}"
