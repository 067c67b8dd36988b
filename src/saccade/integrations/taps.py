"""All taps of a model at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from saccade.integrations.own_tap import tapped_mechanisms
from saccade.integrations.sdpa_tap import tapped_products
from saccade.integrations.tap import Sink, Valve
from saccade.integrations.torch_tap import tapped_torch_layers
from saccade.integrations.transformers_tap import tapped_interface

__all__ = ["tapped"]


@contextmanager
def tapped(model: nn.Module, sink: Sink) -> Iterator[None]:
    """Hand every attention matrix of a model to ``sink`` while the model runs on its own kernels.

    Args:
        model: any torch model.
        sink: called as ``sink(name, make)`` after a layer's own kernel ran; ``make()`` gives the matrix, whose tensors
            are those of the model and may change after the call.

    Cost: none beside what the sink does, and projecting queries and keys once more for ``nn.MultiheadAttention``.
    """
    valve = Valve(sink)
    with (
        tapped_interface(model, valve),
        tapped_products(model, valve),
        tapped_torch_layers(model, valve),
        tapped_mechanisms(model, valve),
    ):
        yield
