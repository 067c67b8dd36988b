"""StateSpace: the S4D layer, a causal layer whose attention weights depend only on distance."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from saccade.caches import LayerCache
from saccade.masks import Mask
from saccade.mechanisms import S4D
from saccade.nn.recurrent_layers import ProjectedTokens, RecurrentLayer
from saccade.positions.token_positions import Positions
from saccade.support.validation import check_bool, check_int


class StateSpace(RecurrentLayer):
    r"""The S4D layer: a state space model filters each channel, and a projection then mixes the channels.

    .. math:: \mathrm{out} = W\, \mathrm{gelu}(A x) + b, \qquad A = \text{the S4D matrix of each channel}

    The layer is causal. It can replace self-attention in `EncoderLayer`, `DecoderLayer` and stacks, supports packed and
    padded sequences, and has a cache of constant size.

    Args:
        embed_dim: width of the tokens, and the number of channels.
        state_dim: size of each channel's state; see `saccade.mechanisms.S4D`.
        mask: combined with Causal and with the mask of each call by ``&``.
        projection_bias: whether the output projection has a bias.

    Raises:
        ValueError: a size is out of range, or inputs have the wrong width.
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

    def _project_tokens(
        self, x: Tensor, mask: Mask | None, positions: Positions | None, convolution_cache: LayerCache | None
    ) -> ProjectedTokens:
        channels = x.mT[..., None]  # as heads
        return ProjectedTokens(self.mechanism, channels, channels, channels)

    def _project_output(self, out: Tensor, tokens: ProjectedTokens) -> Tensor:
        return self.output_projection(F.gelu(out[..., 0].mT))

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, mask={self.mask}"
