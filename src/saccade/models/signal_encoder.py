"""An encoder of long signals, such as speech: convolutions that shorten them, and local attention."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.masks import Mask, Padding
from saccade.matrix import Matrix
from saccade.nn import EncoderLayer, EncoderStack, FeedForward, MultiHeadAttention
from saccade.nn.projections import weight_of
from saccade.positions import Rotary
from saccade.support.argument_hints import AnswersCalls
from saccade.support.errors import describe, shown, value_error
from saccade.support.validation import ShapeSpec, check_int, check_type

__all__ = ["SignalEncoder"]

_SIGNAL = ShapeSpec("signal [batch, len, channels]")


class SignalEncoder(AnswersCalls, nn.Module):
    """Convolutions with strides make frames of a signal; layers of attention with a local mask look at them.

    Each convolution of stride s makes ``ceil(len / s)`` steps of ``len``, and a GELU follows. The attention turns
    frames by their positions (rotary), and norms come first in the layers. Convolutions look ahead only where the mask
    does: with a causal mask, frame t sees nothing behind step ``t * prod(strides)`` of the signal.

    Args:
        channels: numbers in a step of the signal: 1 of a waveform, 80 of a mel spectrogram.
        embed_dim: width of the frames.
        num_heads: divides ``embed_dim``; heads have an even width.
        num_layers: how many layers.
        mask: which frames a frame sees: ``masks.Window(64, 64)``, or ``masks.sliding_window(128)``, which is causal.
        strides: by how much each convolution shortens the signal.
        kernel_size: steps that each convolution reads; odd, and none of the strides is larger.
        feed_forward_dim: width inside the feed-forward networks; ``4 * embed_dim`` when None.
        dropout_p: of what each part of a layer adds, in training only.

    Attributes:
        convolutions: the convolutions, ``nn.Conv1d`` each.
        stack: the layers, an `EncoderStack`.

    Raises:
        ValueError, TypeError: sizes that do not fit, a signal of another shape or dtype, lengths beyond it.

    Cost: linear in the length where the mask is local.

    Example:
        >>> from saccade.masks import Window
        >>> encoder = SignalEncoder(80, 32, 4, 2, mask=Window(16, 16), strides=(2, 2))
        >>> signal = torch.randn(2, 101, 80)
        >>> encoder(signal, lengths=[101, 60]).shape, encoder.frames([101, 60])
        (torch.Size([2, 26, 32]), (26, 15))

    Reference: convolutions before attention, Baevski et al. 2020, arXiv:2006.11477, section 2; a local window over
    speech, Zhang et al. 2020, "Transformer transducer", arXiv:2002.02562, section 3.
    """

    def __init__(
        self,
        channels: int,
        embed_dim: int,
        num_heads: int,
        num_layers: int,
        *,
        mask: Mask,
        strides: Sequence[int] = (2, 2),
        kernel_size: int = 3,
        feed_forward_dim: int | None = None,
        dropout_p: float = 0.0,
    ):
        super().__init__()
        self.channels = check_int("channels", channels)
        check_type("mask", mask, Mask, "be a saccade mask", hint="for instance masks.Window(64, 64)")
        given = check_type("strides", strides, (tuple, list), "be a tuple of ints")
        self.strides = tuple(check_int("strides", stride) for stride in given)
        self.kernel_size = check_int("kernel_size", kernel_size, max([1, *self.strides]))
        if kernel_size % 2 == 0:
            raise value_error("kernel_size", "be odd", kernel_size)
        check_int("num_layers", num_layers)
        widths = [self.channels, *[check_int("embed_dim", embed_dim)] * len(self.strides)]
        if not self.strides:
            raise value_error("strides", "have at least one", shown(strides), hint="(1,) shortens nothing")
        self.convolutions = nn.ModuleList(
            nn.Conv1d(*sizes, kernel_size, stride)
            for sizes, stride in zip(itertools.pairwise(widths), self.strides, strict=True)
        )
        # What a convolution reads before and behind a step.
        self._around = (kernel_size - 1, 0) if mask.is_causal else (kernel_size // 2, kernel_size // 2)
        hidden_dim = 4 * embed_dim if feed_forward_dim is None else feed_forward_dim
        layers = (_layer(embed_dim, num_heads, mask, hidden_dim, dropout_p) for _ in range(num_layers))
        self.stack = EncoderStack(layers, final_norm=nn.LayerNorm(embed_dim))

    def forward(self, signal: Tensor, *, lengths: Sequence[int] | Tensor | None = None) -> Tensor:
        """Encode.

        Args:
            signal: ``[batch, len, channels]``, len at least 1.
            lengths: real steps of each signal, which is padded on the right; all when None.

        Returns:
            ``[batch, frames, embed_dim]``; which of them are real, `frames` says. Padding changes none of these.
        """
        frames, padding = self._frames_of(signal, lengths)
        return self.stack(frames, mask=padding)

    def matrices(self, signal: Tensor, *, lengths: Sequence[int] | Tensor | None = None) -> list[Matrix]:
        """Who attends to whom in every layer when `forward` gets the same arguments.

        Returns:
            One matrix a layer, ``[batch, num_heads, frames, frames]``, not built.
        """
        frames, padding = self._frames_of(signal, lengths)
        return self.stack.matrices(frames, mask=padding)

    def frames(self, lengths: Sequence[int] | Tensor) -> tuple[int, ...]:
        """How many frames are made of signals of these lengths."""
        return _shortened(Padding(lengths).lengths, self.strides)

    def extra_repr(self) -> str:
        return f"{self.channels}, strides={self.strides}, kernel_size={self.kernel_size}"

    def _frames_of(self, signal: Tensor, lengths: Sequence[int] | Tensor | None) -> tuple[Tensor, Padding | None]:
        """What the convolutions make of a signal, and which of the frames are real."""
        sizes = _SIGNAL.check(signal, channels=self.channels)
        if not sizes["len"]:
            raise value_error("signal", "have at least one step", list(signal.shape))
        weight = weight_of(self.convolutions[0])
        if weight is not None and signal.dtype != weight.dtype and not torch.is_autocast_enabled(signal.device.type):
            rule, got = (str(dtype).removeprefix("torch.") for dtype in (weight.dtype, signal.dtype))
            facts = [describe("signal", signal)]
            raise value_error("dtype", f"be {rule}, like the parameters", got, facts=facts)
        real = None if lengths is None else Padding(lengths).lengths
        if real is not None and (len(real) != len(signal) or max(real) > sizes["len"]):
            rule = f"be one for each of the {len(signal)} signals, at most {sizes['len']}"
            raise value_error("lengths", rule, shown(real))
        x = signal.mT  # [batch, channels, len]
        for convolution, stride in zip(self.convolutions, self.strides, strict=True):
            if real is not None:  # convolutions do not see what stands behind a signal
                places = torch.arange(x.shape[2], device=x.device)
                x = x.masked_fill(places >= torch.tensor(real, device=x.device)[:, None, None], 0.0)
                real = _shortened(real, (stride,))
            x = F.gelu(convolution(F.pad(x, self._around)))
        return x.mT, None if real is None else Padding(real)


def _shortened(lengths: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    for stride in strides:
        lengths = [-(-length // stride) for length in lengths]
    return tuple(lengths)


def _layer(embed_dim: int, num_heads: int, mask: Mask, hidden_dim: int, dropout_p: float) -> EncoderLayer:
    rotary = Rotary(embed_dim // num_heads)
    attention = MultiHeadAttention(embed_dim, num_heads, mask=mask, rotary=rotary)
    return EncoderLayer(attention, FeedForward(embed_dim, hidden_dim), dropout_p=dropout_p)
