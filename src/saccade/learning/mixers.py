"""Token mixers for small models: attention with various masks and mechanisms, recurrences, convolutions, an LSTM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from saccade import masks, mechanisms
from saccade.masks import Mask
from saccade.mechanisms import Mechanism
from saccade.mechanisms.path import with_reflections
from saccade.nn import ForgettingAttention, MultiHeadAttention, Recurrence, StateSpace


class Mixer(NamedTuple):
    """A token mixer for small models, such as attention or a convolution.

    Args:
        make: function of a width, a length and a layer index (from 0). It returns a module that maps
            ``[batch, length, width]`` to the same shape.
        sees_later: whether tokens attend to later tokens.
    """

    make: Callable[[int, int, int], nn.Module]
    sees_later: bool = False


class ShortConvolution(nn.Module):
    """A causal convolution that is applied to each channel separately.

    Args:
        width: number of channels.
        size: number of tokens in the kernel, including the current one.
        dilation: distance between adjacent tokens of the kernel.

    Example:
        >>> import torch
        >>> ShortConvolution(4, 3)(torch.ones(1, 5, 4)).shape
        torch.Size([1, 5, 4])
    """

    def __init__(self, width: int, size: int, dilation: int = 1):
        super().__init__()
        self.convolution = nn.Conv1d(width, width, size, groups=width, dilation=dilation)
        self.reach = (size - 1) * dilation

    def forward(self, x: Tensor) -> Tensor:
        """Return the short convolution of ``x [batch, length, width]``, with the same shape."""
        return self.convolution(F.pad(x.mT, (self.reach, 0))).mT


class DilatedConvolutions(nn.Module):
    """A mixer of three causal convolutions over three tokens each, with doubling dilations and channel projections.

    Args:
        width: number of channels.
        layer: index of the layer, from 0; its dilations continue those of the layer below.

    Reference: van den Oord et al. 2016, arXiv:1609.03499, section 2.1.
    """

    def __init__(self, width: int, layer: int):
        super().__init__()
        self.convolutions = nn.ModuleList(ShortConvolution(width, 3, 2 ** (3 * layer + i)) for i in range(3))
        self.mixing = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return the dilated convolutions of ``x [batch, length, width]``, with the same shape."""
        for convolution, mixing in zip(self.convolutions, self.mixing, strict=True):
            x = x + F.gelu(mixing(convolution(x)))
        return x


class LSTM(nn.Module):
    """A ``torch.nn.LSTM`` that returns only its outputs.

    Args:
        width: width of inputs and outputs.
    """

    def __init__(self, width: int):
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the LSTM's outputs for ``x [batch, length, width]``, with the same shape."""
        out: Tensor = self.lstm(x)[0]
        return out


class PaTHAttention(nn.Module):
    """A mixer of softmax attention with `PaTH`, in which each token reflects keys with its own vector and strength.

    Args:
        width: number of channels.
        heads: number of heads.
    """

    def __init__(self, width: int, heads: int = 8):
        super().__init__()
        self.heads, self.mechanism = heads, mechanisms.PaTH(width // heads)
        self.inputs = nn.Linear(width, 4 * width, bias=False)
        self.strength = nn.Linear(width, heads)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention of ``x [batch, length, width]``, with the same shape."""
        split = self.inputs(x).unflatten(2, (4, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value, w = split.unbind()
        keys = with_reflections(key, F.normalize(w, dim=-1), 2.0 * self.strength(x).sigmoid().mT)
        out = self.mechanism(query, keys, mask=masks.Causal()) @ value
        return self.output(out.transpose(1, 2).flatten(2))


def attention_mixer(
    mask: Callable[[int, int], Mask | None], mechanism: Callable[[], Mechanism] | None = None, heads: int = 8
) -> Mixer:
    """Return a token mixer that consists of an attention layer.

    Args:
        mask: function of a length and a layer index that returns the mask.
        mechanism: builds the mechanism of each layer; exact attention if None.
        heads: number of heads.
    """

    def make(width: int, length: int, layer: int) -> nn.Module:
        built = None if mechanism is None else mechanism()
        return MultiHeadAttention(width, heads, mask=mask(length, layer), mechanism=built, projection_bias=False)

    return Mixer(make)


def _recurrence(
    mechanism: Callable[[], Mechanism], heads: int = 8, decay: Literal["token", "channel"] | None = None
) -> Mixer:
    return Mixer(lambda width, length, layer: Recurrence(width, heads, mechanism(), decay=decay))


def _causal(length: int, layer: int) -> Mask:
    return masks.Causal()


def _window(length: int, layer: int) -> Mask:
    return masks.sliding_window(length // 8)


def _longformer(length: int, layer: int) -> Mask:
    return masks.longformer(length // 8) & masks.Causal()


def _bigbird(length: int, layer: int) -> Mask:
    return masks.bigbird(length // 16, global_blocks=1, random_blocks=1, seed=layer) & masks.Causal()


def _strided(length: int, layer: int) -> Mask:
    return masks.sparse_transformer(length // 8)


def _linformer(width: int, length: int, layer: int) -> nn.Module:
    return MultiHeadAttention(width, 8, mechanism=mechanisms.Linformer(length, length // 4), projection_bias=False)


MIXERS: Mapping[str, Mixer] = MappingProxyType(
    {
        "full": attention_mixer(_causal),
        "full, 1 head": attention_mixer(_causal, heads=1),
        "uniform": attention_mixer(_causal, lambda: mechanisms.Softmax(scale=0.0)),
        "window": attention_mixer(_window),
        "Longformer": attention_mixer(_longformer),
        "BigBird": attention_mixer(_bigbird),
        "strided": attention_mixer(_strided),
        "linear": attention_mixer(_causal, mechanisms.Linear),
        "linear, 1 head": attention_mixer(_causal, mechanisms.Linear, heads=1),
        "Performer": attention_mixer(_causal, lambda: mechanisms.Performer(32)),
        "Linformer": Mixer(_linformer, sees_later=True),
        "forgetting": Mixer(lambda width, length, layer: ForgettingAttention(width, 8)),
        "PaTH": Mixer(lambda width, length, layer: PaTHAttention(width)),
        "delta": _recurrence(mechanisms.Delta),
        "delta, 1 head": _recurrence(mechanisms.Delta, heads=1),
        "gated delta": _recurrence(mechanisms.Delta, decay="token"),
        "gated delta, 1 head": _recurrence(mechanisms.Delta, heads=1, decay="token"),
        "gated delta 2": _recurrence(mechanisms.GatedDelta2, decay="channel"),
        "delta product": _recurrence(mechanisms.DeltaProduct),
        "RWKV-7": _recurrence(mechanisms.RWKV7),
        "mesa": _recurrence(mechanisms.Mesa, decay="token"),
        "SSD": _recurrence(lambda: mechanisms.SSD(8)),
        "SSD, 1 head": _recurrence(lambda: mechanisms.SSD(1), heads=1),
        "Mamba-3": _recurrence(mechanisms.Mamba3),
        "S4D": Mixer(lambda width, length, layer: StateSpace(width, 16, projection_bias=False)),
        "LSTM": Mixer(lambda width, length, layer: LSTM(width)),
        "dilated CNN": Mixer(lambda width, length, layer: DilatedConvolutions(width, layer)),
    }
)
"""The mixers by name. Attention has 8 heads unless the name says 1, and a window is an eighth of the length."""
