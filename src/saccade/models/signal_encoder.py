"""SignalEncoder: strided convolutions and local attention, for long signals such as speech."""

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
from saccade.support.argument_hints import ArgumentHints
from saccade.support.errors import describe, shown, value_error
from saccade.support.validation import ShapeSpec, check_int, check_type

_SIGNAL = ShapeSpec("signal [batch, len, channels]")


class SignalEncoder(ArgumentHints, nn.Module):
    """An encoder for long signals: strided convolutions turn a signal into frames, which then attend locally.

    Each convolution with stride s is followed by a GELU and shortens ``len`` samples to ``ceil(len / s)``. Attention
    uses rotary positions, and the layers are pre-norm. Convolutions look ahead only if the mask does: with a causal
    mask, frame t does not depend on samples after ``t * prod(strides)``.

    Args:
        channels: number of values per sample: 1 for a waveform, 80 for a mel spectrogram.
        embed_dim: width of the frames.
        num_heads: number of attention heads; divides ``embed_dim``, and the width of a head must be even.
        num_layers: number of layers.
        mask: which frames a frame may attend to: ``masks.Window(64, 64)``, or the causal ``masks.sliding_window(128)``.
        strides: the strides of the convolutions; each shortens the signal by this factor.
        kernel_size: kernel width of each convolution; odd, and at least as large as each stride.
        feed_forward_dim: width inside the feed-forward networks; ``4 * embed_dim`` if None.
        dropout_p: dropout of the output of each part of a layer, in training only.

    Attributes:
        convolutions: the convolutions, each an ``nn.Conv1d``.
        stack: the layers, an `EncoderStack`.

    Raises:
        ValueError, TypeError: sizes are incompatible, the signal has the wrong shape or dtype, or a length exceeds it.

    Cost: linear in the length if the mask is local.

    Example:
        >>> from saccade.masks import Window
        >>> encoder = SignalEncoder(80, 32, 4, 2, mask=Window(16, 16), strides=(2, 2))
        >>> signal = torch.randn(2, 101, 80)
        >>> encoder(signal, lengths=[101, 60]).shape, encoder.frames([101, 60])
        (torch.Size([2, 26, 32]), (26, 15))

    Reference: Baevski et al. 2020, arXiv:2006.11477, section 2 (convolutions before attention); Zhang et al. 2020,
    "Transformer transducer", arXiv:2002.02562, section 3 (local window over speech).
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
        listed = check_type("strides", strides, (tuple, list), "be a tuple of ints")
        self.strides = tuple(check_int("strides", stride) for stride in listed)
        self.kernel_size = check_int("kernel_size", kernel_size, max([1, *self.strides]))
        if kernel_size % 2 == 0:
            raise value_error("kernel_size", "be odd", kernel_size)
        check_int("num_layers", num_layers)
        widths = [self.channels, *[check_int("embed_dim", embed_dim)] * len(self.strides)]
        if not self.strides:
            raise value_error(
                "strides", "contain at least one stride", shown(strides), hint="(1,) does not shorten the signal"
            )
        self.convolutions = nn.ModuleList(
            nn.Conv1d(*sizes, kernel_size, stride)
            for sizes, stride in zip(itertools.pairwise(widths), self.strides, strict=True)
        )
        # numbers of zeros to add before and after the signal
        self._padding = (kernel_size - 1, 0) if mask.is_causal else (kernel_size // 2, kernel_size // 2)
        hidden_dim = 4 * embed_dim if feed_forward_dim is None else feed_forward_dim
        layers = (_layer(embed_dim, num_heads, mask, hidden_dim, dropout_p) for _ in range(num_layers))
        self.stack = EncoderStack(layers, final_norm=nn.LayerNorm(embed_dim))

    def forward(self, signal: Tensor, *, lengths: Sequence[int] | Tensor | None = None) -> Tensor:
        """Return the encoded frames of a signal.

        Args:
            signal: ``[batch, len, channels]``, len at least 1.
            lengths: length of each signal without the padding on its right; None for no padding.

        Returns:
            ``[batch, frames, embed_dim]``. The method `frames` returns how many frames of each signal are not padding.
            These frames do not depend on the padding.
        """
        frames, padding = self._frames_of(signal, lengths)
        return self.stack(frames, mask=padding)

    @torch.no_grad()
    def matrices(self, signal: Tensor, *, lengths: Sequence[int] | Tensor | None = None) -> list[Matrix]:
        """Return the attention matrices that `forward` uses in the signal encoder's layers.

        Returns:
            One lazy matrix per layer, ``[batch, num_heads, frames, frames]``, without gradients.
        """
        frames, padding = self._frames_of(signal, lengths)
        return self.stack.matrices(frames, mask=padding)

    def frames(self, lengths: Sequence[int] | Tensor) -> tuple[int, ...]:
        """Return the number of frames that the encoder computes for a signal of each length."""
        return _shortened(Padding(lengths).lengths, self.strides)

    def extra_repr(self) -> str:
        return f"{self.channels}, strides={self.strides}, kernel_size={self.kernel_size}"

    def _frames_of(self, signal: Tensor, lengths: Sequence[int] | Tensor | None) -> tuple[Tensor, Padding | None]:
        """Check a signal, and apply the convolutions.

        Return the frames, ``[batch, frames, embed_dim]``, and their padding mask, which is None if there are no
        ``lengths``.
        """
        sizes = _SIGNAL.check(signal, channels=self.channels)
        if not sizes["len"]:
            raise value_error("signal", "have at least one step", list(signal.shape))
        weight = weight_of(self.convolutions[0])
        if weight is not None and signal.dtype != weight.dtype and not torch.is_autocast_enabled(signal.device.type):
            rule, got = (str(dtype).removeprefix("torch.") for dtype in (weight.dtype, signal.dtype))
            facts = [describe("signal", signal)]
            raise value_error("dtype", f"be {rule}, like the parameters", got, facts=facts)
        valid = None if lengths is None else Padding(lengths).lengths
        if valid is not None and (len(valid) != len(signal) or max(valid) > sizes["len"]):
            rule = f"be one for each of the {len(signal)} signals, at most {sizes['len']}"
            raise value_error("lengths", rule, shown(valid))
        x = signal.mT  # [batch, channels, len]
        for convolution, stride in zip(self.convolutions, self.strides, strict=True):
            if valid is not None:  # convolutions must not read padding
                steps = torch.arange(x.shape[2], device=x.device)
                x = x.masked_fill(steps >= torch.tensor(valid, device=x.device)[:, None, None], 0.0)
                valid = _shortened(valid, (stride,))
            x = F.gelu(convolution(F.pad(x, self._padding)))
        return x.mT, None if valid is None else Padding(valid)


def _shortened(lengths: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    for stride in strides:
        lengths = [-(-length // stride) for length in lengths]
    return tuple(lengths)


def _layer(embed_dim: int, num_heads: int, mask: Mask, hidden_dim: int, dropout_p: float) -> EncoderLayer:
    rotary = Rotary(embed_dim // num_heads)
    attention = MultiHeadAttention(embed_dim, num_heads, mask=mask, rotary=rotary)
    return EncoderLayer(attention, FeedForward(embed_dim, hidden_dim), dropout_p=dropout_p)
