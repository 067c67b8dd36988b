"""Learner: a small model, whatever mixes its tokens."""

from __future__ import annotations

from torch import Tensor, nn

from saccade.learning.convolutions import ShortConvolution
from saccade.learning.mixers import Mixer
from saccade.nn import FeedForward
from saccade.support.errors import value_error
from saccade.support.validation import check_int

__all__ = ["Learner"]

_BESIDE = 12  # parameters of a layer, in squares of its width: attention's 4, and 8 of a feed-forward of 4 widths


class Learner(nn.Module):
    """Tokens and positions, layers of a short convolution, a mixer and a feed-forward network, and a word each.

    All learners of one width have as many parameters, to half a percent: feed-forward networks take what mixers leave.

    Args:
        mixer: what mixes tokens.
        vocab_size: number of tokens.
        length: tokens in a text.
        width: of tokens.
        num_layers: number of layers.

    Raises:
        ValueError: a mixer with more parameters than a layer may have.
    """

    def __init__(self, mixer: Mixer, vocab_size: int, length: int, *, width: int = 64, num_layers: int = 2):
        super().__init__()
        check_int("num_layers", num_layers)
        self.tokens = nn.Embedding(vocab_size, width)
        self.places = nn.Embedding(length, width)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.layers = nn.ModuleList(_Layer(mixer.make(width, length, i), width) for i in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.words = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens: Tensor, asked: Tensor | None = None) -> Tensor:
        """Logits for tokens ``[batch, length]``.

        Args:
            tokens: of texts no longer than ``length``.
            asked: bool ``[batch, length]``, where logits are wanted; None for everywhere.

        Returns:
            ``[batch, length, vocab_size]``, or ``[asked tokens, vocab_size]``.
        """
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.words(self.norm(x if asked is None else x[asked]))


class _Layer(nn.Module):
    def __init__(self, mixer: nn.Module, width: int):
        super().__init__()
        own, most = sum(x.numel() for x in mixer.parameters()), _BESIDE * width**2
        hidden = (most - own) // (2 * width)
        if hidden < 1:
            raise value_error("mixer", f"have fewer than {most} parameters", own)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.nearby = ShortConvolution(width, 4)
        self.mixer = mixer
        self.feed_forward = FeedForward(width, hidden, projection_bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.nearby(self.norms[0](x)))
        return x + self.feed_forward(self.norms[1](x))
