"""What mixes the tokens of a small model: attention with every mask and mechanism, recurrences, convolutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from torch import nn

from saccade import masks, mechanisms
from saccade.learning.convolutions import DilatedConvolutions
from saccade.learning.lstm import LSTM
from saccade.masks import Mask
from saccade.mechanisms import Mechanism
from saccade.nn import MultiHeadAttention, Recurrence, StateSpace

__all__ = ["MIXERS", "Mixer"]


class Mixer(NamedTuple):
    """A way to mix tokens.

    Args:
        make: a module from ``[batch, length, width]`` to the same, for a width, a length, and a layer from 0.
        sees_later: whether tokens see later ones.
    """

    make: Callable[[int, int, int], nn.Module]
    sees_later: bool = False


def _attention(
    mask: Callable[[int, int], Mask], mechanism: Callable[[], Mechanism] | None = None, heads: int = 8
) -> Mixer:
    """Attention; the mask is made for a length and a layer."""

    def make(width: int, length: int, layer: int) -> nn.Module:
        own = None if mechanism is None else mechanism()
        return MultiHeadAttention(width, heads, mask=mask(length, layer), mechanism=own, projection_bias=False)

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
        "full": _attention(_causal),
        "full, 1 head": _attention(_causal, heads=1),
        "uniform": _attention(_causal, lambda: mechanisms.Softmax(scale=0.0)),
        "window": _attention(_window),
        "Longformer": _attention(_longformer),
        "BigBird": _attention(_bigbird),
        "strided": _attention(_strided),
        "linear": _attention(_causal, mechanisms.Linear),
        "linear, 1 head": _attention(_causal, mechanisms.Linear, heads=1),
        "Performer": _attention(_causal, lambda: mechanisms.Performer(32)),
        "Linformer": Mixer(_linformer, sees_later=True),
        "delta": _recurrence(mechanisms.Delta),
        "delta, 1 head": _recurrence(mechanisms.Delta, heads=1),
        "gated delta": _recurrence(mechanisms.Delta, decay="token"),
        "gated delta, 1 head": _recurrence(mechanisms.Delta, heads=1, decay="token"),
        "SSD": _recurrence(lambda: mechanisms.SSD(8)),
        "SSD, 1 head": _recurrence(lambda: mechanisms.SSD(1), heads=1),
        "S4D": Mixer(lambda width, length, layer: StateSpace(width, 16, projection_bias=False)),
        "LSTM": Mixer(lambda width, length, layer: LSTM(width)),
        "dilated CNN": Mixer(lambda width, length, layer: DilatedConvolutions(width, layer)),
    }
)
"""By name. Attention has 8 heads unless the name says 1; windows reach an eighth of the text."""
