"""Learner: a small model around a mixer of tokens."""

from __future__ import annotations

from torch import Tensor, nn

from saccade.learning.mixers import Mixer, ShortConvolution
from saccade.nn import FeedForward
from saccade.support.errors import value_error
from saccade.support.validation import check_int

_LAYER_SIZE = 12  # parameters of a layer, in squares of its width: 4 for attention, 8 for the feed-forward network


class Learner(nn.Module):
    """A small language model whose layers have a short convolution, a mixer and a feed-forward network.

    All learners of one width have the same number of parameters, to half a percent: the width of feed-forward networks
    depends on the mixer.

    Args:
        mixer: builds the mixer of each layer.
        vocab_size: number of tokens.
        length: tokens in a text.
        width: width of tokens.
        num_layers: number of layers.

    Raises:
        ValueError: a mixer with too many parameters.
    """

    def __init__(self, mixer: Mixer, vocab_size: int, length: int, *, width: int = 64, num_layers: int = 2):
        super().__init__()
        check_int("num_layers", num_layers)
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(length, width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.layers = nn.ModuleList(_Layer(mixer.make(width, length, i), width) for i in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens: Tensor, asked: Tensor | None = None) -> Tensor:
        """Return logits for tokens ``[batch, length]``.

        Args:
            tokens: sequences no longer than ``length``.
            asked: bool ``[batch, length]``, the tokens to compute logits for; None for all.

        Returns:
            ``[batch, length, vocab_size]``, or ``[asked tokens, vocab_size]``.
        """
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x if asked is None else x[asked]))


class _Layer(nn.Module):
    def __init__(self, mixer: nn.Module, width: int):
        super().__init__()
        size, limit = sum(x.numel() for x in mixer.parameters()), _LAYER_SIZE * width**2
        hidden = (limit - size) // (2 * width)
        if hidden < 1:
            raise value_error("mixer", f"have fewer than {limit} parameters", size)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.convolution = ShortConvolution(width, 4)
        self.mixer = mixer
        self.feed_forward = FeedForward(width, hidden, projection_bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.convolution(self.norms[0](x)))
        return x + self.feed_forward(self.norms[1](x))
